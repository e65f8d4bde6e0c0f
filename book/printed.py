"""The book as one PDF and one ePub for each language: ``python book/build.py --print``.

Both are made of the pages of the rendered site, so that numbers, figures and outputs are the same
here and there. Chromium takes the articles out of the pages (``_print/part.js``). It prints the PDF
with the answers unfolded, with bookmarks, and with a table of contents that says the page of each
section; for the ePub it sets the formulas in MathML and writes XHTML.
"""

import json
import os
import re
import time
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import yaml
from browser import chromium
from execution import digest
from languages import LANGUAGES, Language
from playwright.sync_api import Page

HERE = Path(__file__).resolve().parent
FILES = HERE / "_print"
COVER = {"width": 600, "height": 800}  # pixels; the picture has twice as many
STYLESHEET = re.compile(r'<link\b[^>]*?href="([^"?]+\.css)')
LICENCE = re.compile(r"<p>([^<]*CC BY[^<]*)</p>")  # as the foot of each page says it
Places = dict[tuple[str, str], int]


class Book:
    """The book in one language, in parts: each is a page of the site.

    Args:
        language: the language.
        root: the project, whose site is rendered.
        only: the pages to take; default: all that ``_toc.yml`` names.
    """

    def __init__(self, language: Language, root: Path, only: list[str] | None = None):
        self.language, self.root = language, root
        self.site = root / "_build" / "html" / language.code
        toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
        groups = [("", [toc["root"]])]
        for group in toc["parts"]:
            caption = group.get("caption", "")
            name = language.captions.get(caption, caption)
            groups.append((name, [chapter["file"] for chapter in group["chapters"]]))
        groups = [(name, [p for p in pages if only is None or p in only]) for name, pages in groups]
        self.groups = [(name, pages) for name, pages in groups if pages]
        self.pages = [page for _, pages in self.groups for page in pages]
        own, first = root / "images" / language.code / "ring.svg", root / "images" / "ring.svg"
        picture = (own if own.exists() else first).read_text(encoding="utf-8")
        self.picture = re.sub(r"<style>.*?</style>", "", picture)
        self.licence = LICENCE.search(self._read(self.pages[0]))[1]

    def _read(self, page):
        return (self.site / f"{page}.html").read_text(encoding="utf-8")

    def parts(self, document: Page, kind: str) -> dict[str, dict]:
        """Make the parts for a "pdf" or an "epub", by page.

        Raises:
            ValueError: a link leads to a place that no part has.
        """
        parts = {}
        for page in self.pages:
            options = {"page": page, "pages": self.pages, "kind": kind}
            parts[page] = document.evaluate("([a, b]) => part(a, b)", [self._read(page), options])
        places = {(page, "") for page in self.pages}
        places |= {(page, id) for page, part in parts.items() for id in part["ids"]}
        for page, part in parts.items():
            for link in part["links"]:
                if tuple(link) not in places:
                    raise ValueError(
                        f"{page} leads to {'#'.join(link)}, and there is no such place"
                    )
        return parts

    def cover(self) -> str:
        """Return the cover as HTML."""
        title, subtitle = escape(self.language.title), escape(self.language.subtitle)
        return (
            f'<section class="naranhi-cover"><p class="title">{title}</p>'
            f'<p class="subtitle">{subtitle}</p>{self.picture}</section>'
        )

    def contents(self, parts: dict[str, dict], address: str, numbers: Places | None) -> str:
        """Return a table of contents as HTML: an ordered list, in it one for each group of pages.

        Args:
            parts: as `parts` returns them.
            address: a format of an address, with {page} and {anchor}.
            numbers: the page that each place is on, where there are pages; {} if yet unknown.
        """

        def entry(page, anchor, title):
            href = address.format(page=page, anchor=anchor).rstrip("#-")
            number = "" if numbers is None else f"<b>{numbers.get((page, anchor), 0)}</b>"
            return f'<a href="{href}"><span>{escape(title)}</span>{number}</a>'

        items = []
        for name, pages in self.groups:
            chapters = []
            for page in pages:
                part = parts[page]
                sections = [f"<li>{entry(page, *section)}</li>" for section in part["sections"]]
                below = f"<ol>{''.join(sections)}</ol>" if sections else ""
                chapters.append(f'<li class="page">{entry(page, "", part["title"])}{below}</li>')
            within = "".join(chapters)
            items.append(
                f"<li><span>{escape(name)}</span><ol>{within}</ol></li>" if name else within
            )
        return f"<ol>{''.join(items)}</ol>"


@contextmanager
def opened(book: Book) -> Iterator[Page]:
    """Open an empty document in Chromium, with the site's style and MathJax."""
    site = book.site.as_uri()
    page = (book.site / f"{book.pages[0]}.html").read_text(encoding="utf-8")
    styles = [f"{site}/{name}" for name in STYLESHEET.findall(page)]
    styles.append((FILES / "pdf.css").as_uri())
    maths = {
        "startup": {"typeset": False},
        "chtml": {"matchFontHeight": False},
        "options": {"enableMenu": False, "processHtmlClass": "math"},
    }
    skeleton = book.root / "_build" / "print" / f"{book.language.code}.html"
    skeleton.parent.mkdir(parents=True, exist_ok=True)
    skeleton.write_text(
        f'<!doctype html><html lang="{book.language.code}" data-theme="light">'
        f'<meta charset="utf-8"><title>{escape(book.language.title)}</title>'
        + "".join(f'<link rel="stylesheet" href="{style}">' for style in styles)
        + f"<script>MathJax = {json.dumps(maths)}</script>"
        f'<script src="{site}/_static/mathjax/tex-chtml.js"></script>'
        f'<script src="{(FILES / "part.js").as_uri()}"></script><body></body></html>',
        encoding="utf-8",
    )
    try:
        with chromium() as browser:
            document = browser.new_page(viewport=COVER, device_scale_factor=2)
            document.set_default_timeout(300_000)
            document.goto(skeleton.as_uri())
            yield document
    finally:
        skeleton.unlink()


def pdf(book: Book, document: Page, target: Path) -> None:
    """Print the book, twice: only then is known on which page a section begins."""
    parts = book.parts(document, "pdf")
    heads = "".join(
        f"#{css(page)} {{ page: {css('p' + page)} }} @page {css('p' + page)} "
        f"{{ @top-center {{ content: {json.dumps(part['title'], ensure_ascii=False)} }} }}\n"
        for page, part in parts.items()
    )
    articles = "".join(part["markup"] for part in parts.values())
    licence = f'<p class="naranhi-licence">{book.licence}</p>'
    numbers: Places = {}
    for _ in range(2):
        contents = book.contents(parts, "#{page}--{anchor}", numbers)
        title = f"<h1>{escape(book.language.contents)}</h1>"
        front = f'{licence}<nav class="naranhi-contents">{title}{contents}</nav>'
        body = f"<style>{heads}</style>{book.cover()}{front}{articles}"
        document.evaluate("(body) => typeset(body)", body)
        made = document.pdf(
            prefer_css_page_size=True, print_background=True, outline=True, tagged=True
        )
        numbers = page_numbers(made)
    target.write_bytes(made)


def css(name: str) -> str:
    """Return a name as CSS writes it: one may not begin with a digit."""
    return re.sub(r"^\d", lambda found: f"\\{ord(found[0]):x} ", name)


def page_numbers(pdf: bytes) -> Places:
    """Return the page that each place is on to which a PDF of Chromium's has a link.

    Chromium writes the objects of a PDF one after the other and does not compress them; what it
    compresses are their streams.
    """
    objects = dict(re.findall(rb"\n(\d+) 0 obj\n(.*?)\nendobj", pdf, re.DOTALL))
    [catalogue] = [text for text in objects.values() if text.startswith(b"<</Type /Catalog")]

    def leaves(number: bytes) -> list[bytes]:
        kids = re.search(rb"/Kids \[(.*?)\]", objects[number], re.DOTALL)
        if not kids:
            return [number]
        return [leaf for kid in re.findall(rb"(\d+) 0 R", kids[1]) for leaf in leaves(kid)]

    def reference(key: bytes) -> bytes:
        return re.search(rb"/%s (\d+) 0 R" % key, catalogue)[1]

    order = {leaf: number for number, leaf in enumerate(leaves(reference(b"Pages")), 1)}
    places = re.findall(rb"/([^\s/\[]+) \[(\d+) 0 R /XYZ", objects[reference(b"Dests")])
    numbers = {}
    for name, leaf in places:
        plain = re.sub(rb"#([0-9A-Fa-f]{2})", lambda found: bytes.fromhex(found[1].decode()), name)
        page, _, anchor = plain.decode().partition("--")
        numbers[page, anchor] = order[leaf]
    return numbers


def epub(book: Book, document: Page, target: Path) -> None:
    """Write the book as an EPUB 3."""
    language, parts = book.language, book.parts(document, "epub")
    document.evaluate("(body) => typeset(body)", book.cover())
    contents = book.contents(parts, "{page}.xhtml#{anchor}", None)
    pygments = (book.site / "_static/pygments.css").read_text(encoding="utf-8")
    light = re.findall(r'^html\[data-theme="light"\] (.*)$', pygments, re.MULTILINE)
    files = {
        "cover.png": document.screenshot(),
        "cover.xhtml": page_of(
            book, f'<div class="cover"><img src="cover.png" alt="{escape(language.title)}"/></div>'
        ),
        "nav.xhtml": page_of(
            book, f'<nav epub:type="toc"><h1>{escape(language.contents)}</h1>{contents}</nav>'
        ),
        "book.css": (FILES / "epub.css").read_text(encoding="utf-8") + "\n".join(light),
    }
    items = {
        "cover.png": 'media-type="image/png" properties="cover-image"',
        "cover.xhtml": 'media-type="application/xhtml+xml"',
        "nav.xhtml": 'media-type="application/xhtml+xml" properties="nav"',
        "book.css": 'media-type="text/css"',
    }
    for page, part in parts.items():
        holds = " ".join({"svg": "svg", "math": "mathml"}[name] for name in part["holds"])
        files[f"{page}.xhtml"] = page_of(book, part["markup"], part["title"])
        properties = f' properties="{holds}"' if holds else ""
        items[f"{page}.xhtml"] = f'media-type="application/xhtml+xml"{properties}'
    manifest = "".join(
        f'<item id="i-{name}" href="{name}" {kind}/>' for name, kind in items.items()
    )
    order = ["cover.xhtml", "nav.xhtml", *(f"{page}.xhtml" for page in parts)]
    spine = "".join(f'<itemref idref="i-{name}"/>' for name in order)
    when = datetime.fromtimestamp(float(os.environ.get("SOURCE_DATE_EPOCH", time.time())), UTC)
    identifier = uuid.uuid5(uuid.NAMESPACE_DNS, f"naranhi.{language.code}")
    files["book.opf"] = (
        '<?xml version="1.0" encoding="utf-8"?><package xmlns="http://www.idpf.org/2007/opf" '
        f'version="3.0" unique-identifier="id" xml:lang="{language.code}">'
        '<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
        f'<dc:identifier id="id">urn:uuid:{identifier}</dc:identifier>'
        f"<dc:title>{escape(language.title)}</dc:title><dc:language>{language.code}</dc:language>"
        f"<dc:creator>Naranhi</dc:creator><dc:rights>{book.licence}</dc:rights>"
        f"<dc:description>{escape(language.subtitle)}</dc:description>"
        f'<meta property="dcterms:modified">{when:%Y-%m-%dT%H:%M:%SZ}</meta></metadata>'
        f"<manifest>{manifest}</manifest><spine>{spine}</spine></package>"
    )
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        archive.writestr(
            "META-INF/container.xml",
            '<?xml version="1.0"?><container version="1.0" '
            'xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile '
            'full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles>'
            "</container>",
        )
        for name, content in files.items():
            archive.writestr(name, content)


def page_of(book: Book, body: str, title: str | None = None) -> str:
    """Return a page of an ePub."""
    code, title = book.language.code, escape(title or book.language.title)
    return (
        '<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html>'
        '<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops" '
        f'lang="{code}" xml:lang="{code}"><head><title>{title}</title>'
        f'<link rel="stylesheet" href="book.css"/></head><body>{body}</body></html>'
    )


def books(root: Path) -> None:
    """Make the PDF and the ePub of each language whose site or whose layout has changed."""
    folder = root / "_build" / "print"
    layout = [digest(file.read_bytes()) for file in sorted(FILES.iterdir())]
    for language in LANGUAGES:
        book = Book(language, root)
        targets = [folder / f"naranhi-{language.code}.{kind}" for kind in ("pdf", "epub")]
        stamp = folder / f".{language.code}.inputs"
        inputs = digest(json.dumps([(book.site / ".inputs").read_text(encoding="utf-8"), *layout]))
        same = stamp.exists() and stamp.read_text(encoding="utf-8") == inputs
        if same and all(target.exists() for target in targets):
            print(f"  {language.code}: up to date")
            continue
        stamp.unlink(missing_ok=True)  # or an interruption would leave two books with one stamp
        with opened(book) as document:
            for make, target in zip((pdf, epub), targets, strict=True):
                print(f"  {target.relative_to(root)}", flush=True)
                make(book, document, target)
        stamp.write_text(inputs, encoding="utf-8")
