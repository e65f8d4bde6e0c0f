"""The book as PDF and ePub, of three pages of the built site: what a reader of paper finds."""

import re
import subprocess
import zipfile
from contextlib import nullcontext
from pathlib import PurePosixPath
from types import SimpleNamespace
from xml.etree import ElementTree

import browser
import nbformat
import printed
import pytest
from alone import CannotBuild
from languages import BY_CODE

REPOSITORY = printed.HERE.parent
PAGES = ["welcome", "06_gpipe", "glossary"]
XHTML = "{http://www.w3.org/1999/xhtml}"
OPF = "{http://www.idpf.org/2007/opf}"
DC = "{http://purl.org/dc/elements/1.1/}"

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def made(built, tmp_path_factory):
    """The book of three pages: what is printed, and its files."""
    book = printed.Book(BY_CODE["ko"], REPOSITORY, only=PAGES)
    folder = tmp_path_factory.mktemp("print")
    with printed.opened(book) as document:
        printed.pdf(book, document, folder / "book.pdf")
        printed.epub(book, document, folder / "book.epub")
    return book, folder


@pytest.fixture(scope="module")
def sheets(made, needs):
    """The text of each page of the PDF, as another program reads it."""
    program = needs("pdftotext", "poppler-utils")
    command = [program, "-layout", made[1] / "book.pdf", "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return text.split("\f")[:-1]


def plain(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_the_contents_say_the_page_of_each_section(sheets):
    assert "나란히" in sheets[0] and "CC BY" in sheets[1]
    [at] = [at for at, text in enumerate(sheets) if text.strip().startswith("차례")]
    entries = re.findall(r"^\s*(\S.*?)\s{2,}(\d+)$", sheets[at], re.MULTILINE)
    assert len(entries) > 20
    for title, page in entries:
        assert plain(title) in plain(sheets[int(page) - 1]), (title, page)


def test_a_sheet_says_its_chapter_and_its_number(sheets):
    for number, text in enumerate(sheets[2:], 3):
        assert text.strip().split()[-1] == str(number)
    chapter = [text for text in sheets if text.strip().startswith("6. GPipe")]
    assert len(chapter) > 10


def test_paper_has_answers_and_formulas_and_nothing_to_press(sheets):
    text = plain("".join(sheets))
    chapter = nbformat.read(REPOSITORY / "notebooks/ko/06_gpipe.ipynb", as_version=4)
    folded = [one for one in chapter.cells if "hide-cell" in one.metadata.get("tags", [])]
    assert len(folded) > 3
    for cell in folded:
        assert plain(cell.source.split("\n")[0]) in text, cell.id
    assert "펼치기" not in text and "접기" not in text
    assert "\\(" not in text and "\\frac" not in text


def test_the_pdf_has_bookmarks_tags_and_its_language(made):
    pdf = (made[1] / "book.pdf").read_bytes()
    assert pdf.count(b"/Type /Outlines") == 1 and b"/Marked true" in pdf and b"/Lang (ko)" in pdf
    assert b"file://" not in pdf


@pytest.fixture(scope="module")
def archive(made):
    with zipfile.ZipFile(made[1] / "book.epub") as archive:
        yield archive


@pytest.fixture(scope="module")
def trees(archive):
    """What is XML in the ePub, parsed, by the name of the file."""
    kinds = (".xhtml", ".opf", ".xml")
    return {
        name: ElementTree.fromstring(archive.read(name))
        for name in archive.namelist()
        if name.endswith(kinds)
    }


def test_an_epub_begins_with_its_type(archive):
    first = archive.infolist()[0]
    assert (first.filename, first.compress_type) == ("mimetype", zipfile.ZIP_STORED)
    assert archive.read("mimetype") == b"application/epub+zip"


def test_the_package_names_each_file_and_says_what_the_book_is(archive, trees):
    package = trees["book.opf"]
    said = {name: package.find(f".//{DC}{name}").text for name in ("title", "language", "rights")}
    assert (said["title"], said["language"]) == ("나란히", "ko") and "CC BY 4.0" in said["rights"]
    items = {item.get("id"): item for item in package.iter(f"{OPF}item")}
    rest = {"mimetype", "book.opf", "META-INF/container.xml"}
    assert {item.get("href") for item in items.values()} == {*archive.namelist()} - rest
    order = [items[one.get("idref")].get("href") for one in package.iter(f"{OPF}itemref")]
    assert order == ["cover.xhtml", "nav.xhtml", *(f"{page}.xhtml" for page in PAGES)]
    properties = {item.get("href"): item.get("properties") for item in items.values()}
    assert properties["cover.png"] == "cover-image" and properties["nav.xhtml"] == "nav"
    assert properties["06_gpipe.xhtml"] == "svg mathml"
    assert archive.read("cover.png")[:8] == b"\x89PNG\r\n\x1a\n"


def test_each_link_of_an_epub_leads_somewhere(archive, trees):
    pages = {name: tree for name, tree in trees.items() if name.endswith(".xhtml")}
    ids = {
        name: [one.get("id") for one in tree.iter() if one.get("id")]
        for name, tree in pages.items()
    }
    followed = 0
    for name, tree in pages.items():
        assert len(ids[name]) == len({*ids[name]}), name
        for one in tree.iter():
            address = one.get("href") or one.get("src") or ""
            if re.match("https?:", address) or not address:
                continue
            file, _, anchor = address.partition("#")
            file = str(PurePosixPath(file)) if file else name
            assert file in archive.namelist(), (name, address)
            assert not anchor or anchor in ids[file], (name, address)
            followed += 1
    assert followed > 100
    sections = [link.get("href") for link in pages["nav.xhtml"].iter(f"{XHTML}a")]
    assert "06_gpipe.xhtml#bubble" in sections and len(sections) == len({*sections})


def test_formulas_of_an_epub_are_in_mathml(trees):
    chapter = trees["06_gpipe.xhtml"]
    formulas = [*chapter.iter("{http://www.w3.org/1998/Math/MathML}math")]
    assert len(formulas) > 20
    assert any(one.get("display") == "block" for one in formulas)
    text = "".join(chapter.itertext())
    assert "\\(" not in text and "\\[" not in text
    assert not {f"{XHTML}{name}" for name in ("script", "button", "input", "style")} & {
        one.tag for one in chapter.iter()
    }


def test_an_interruption_leaves_no_two_books_with_one_stamp(tmp_path, monkeypatch):
    """The inputs are changed, the PDF is written, and then the change is taken back."""

    def book(language, root):
        return SimpleNamespace(language=language, site=root / "_build/html" / language.code)

    def made(kind, interrupted):
        def make(book, document, target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text((book.site / ".inputs").read_text())
            if interrupted:
                raise KeyboardInterrupt

        monkeypatch.setattr(printed, kind, make)

    def print_of(inputs, *, interrupted=False):
        for language in printed.LANGUAGES:
            site = tmp_path / "_build/html" / language.code
            site.mkdir(parents=True, exist_ok=True)
            (site / ".inputs").write_text(inputs)
        made("epub", False)
        made("pdf", interrupted)
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            printed.books(tmp_path)

    monkeypatch.setattr(printed, "Book", book)
    monkeypatch.setattr(printed, "opened", nullcontext)
    print_of("as it was")
    print_of("changed", interrupted=True)
    print_of("as it was")
    found = {file.read_text() for file in (tmp_path / "_build/print").glob("naranhi-*")}
    assert found == {"as it was"}


def test_a_link_to_nowhere_is_named(built, tmp_path):
    """In a book of one page of its own, which leads to a section that it does not have."""
    site = tmp_path / "_build" / "html" / "en"
    site.mkdir(parents=True)
    (site / "_static").symlink_to(built / "en" / "_static")
    (tmp_path / "images").symlink_to(REPOSITORY / "images")
    (tmp_path / "_toc.yml").write_text("root: only\nparts: []\n")
    article = '<article class="bd-article"><h1 id="a">A</h1>{}</article><p>CC BY</p>'
    links = {"#a": True, "elsewhere.html#b": True, "#b": False}

    def page(link):
        (site / "only.html").write_text(article.format(f'<a href="{link}">there</a>'))
        return printed.Book(BY_CODE["en"], tmp_path)

    with printed.opened(page("#a")) as document:
        for link, fits in links.items():
            if fits:
                assert "there" in page(link).parts(document, "pdf")["only"]["markup"]
            else:
                with pytest.raises(ValueError, match="only leads to only#b"):
                    page(link).parts(document, "pdf")


def test_without_chromium_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(browser, "PROGRAMS", ())
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    words = (
        r"Executable doesn't exist .*: chromium\), or run .venv/bin/playwright install chromium$"
    )
    with pytest.raises(CannotBuild, match=words), browser.chromium():
        pass
