"""The built site in a real browser: headless Chromium, the site served on loopback.

Builds the book first, which takes seconds when nothing has changed since the last build.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import sync_playwright

REPOSITORY = Path(__file__).resolve().parents[2]
HTML = REPOSITORY / "_build" / "html"
TWIN = {"en": "ko", "ko": "en"}
PHONE = {"width": 360, "height": 740}
HANGUL = re.compile("[가-힣]")

pytestmark = pytest.mark.timeout(1800)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site():
    """The address of the site."""
    build = [sys.executable, REPOSITORY / "book" / "build.py", "--jobs", "2"]
    result = subprocess.run(build, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    handler = functools.partial(Quiet, directory=HTML)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        # The system's Chromium where there is one, else the one that Playwright installed.
        where = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=where, args=["--no-sandbox"])
        yield browser
        browser.close()


def names(language: str) -> list[str]:
    pages = sorted(path.stem for path in (HTML / language).glob("*.html"))
    return [page for page in pages if page != "index"]


FACTS = """() => ({
  text: document.querySelector("article")?.textContent.toLowerCase() ?? "",
  prose: [...document.querySelectorAll("article :is(p, li, dd, h1, h2, h3, figcaption)")]
    .flatMap((element) => [...element.childNodes])
    .filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.textContent),
  width: document.documentElement.scrollWidth,
  language: document.documentElement.lang,
  stamp: document.querySelector(".naranhi-stamp")?.textContent,
  download: document.querySelector("a.naranhi-download")?.href,
  twin: document.querySelector(".naranhi-twin")?.href,
  fields: document.querySelectorAll("input[type=search], input[name=q]").length,
  labels: [...document.querySelectorAll("[title], [aria-label], [placeholder], [data-tooltip]")]
    .filter((element) => !element.closest(
      "svg, mjx-container, .cell_output, .onlyprint, a.reference, [lang=en]"))
    .flatMap((element) => ["title", "aria-label", "placeholder", "data-tooltip"]
      .map((name) => element.getAttribute(name)).filter((label) => label)),
  formulas: document.querySelectorAll(".math").length,
  rendered: document.querySelectorAll(".math mjx-container").length,
  broken: document.querySelectorAll("mjx-merror, .problematic").length,
})"""


@pytest.fixture(scope="module")
def visits(site, chromium):
    """What a phone finds on each page, by (language, page): facts, and what was asked and said."""
    found = {}
    context = chromium.new_context(viewport=PHONE)
    for language in TWIN:
        for name in names(language):
            page, requests, said = context.new_page(), [], []
            page.on("request", lambda request, to=requests: to.append(request.url))
            page.on("console", lambda entry, to=said: to.append((entry.type, entry.text)))
            page.on("pageerror", lambda error, to=said: to.append(("error", str(error))))
            page.goto(f"{site}/{language}/{name}.html", wait_until="networkidle")
            page.wait_for_function(
                "() => document.querySelectorAll('.math').length"
                " === document.querySelectorAll('.math mjx-container').length"
            )
            facts = page.evaluate(FACTS)
            found[language, name] = {
                **facts,
                "requests": requests,
                "said": said,
                "answers": answers(page),
            }
            page.close()
    context.close()
    return found


def answers(page) -> dict:
    """The number of folded answers; of the first: its label, and whether it can be read, before and
    after a click on that."""
    folded = page.locator(".tag_hide-cell")
    number = folded.count()
    if not number:
        return {"number": 0}
    label, code = folded.first.locator("summary"), folded.first.locator("pre").first
    said, before = label.inner_text().strip(), code.is_visible()
    label.click()
    return {"number": number, "label": said, "before": before, "after": code.is_visible()}


def test_both_languages_have_the_same_pages(site):
    assert names("en") == names("ko")
    assert len(names("en")) >= 9  # eight pages, and the search


def test_the_switch_on_every_page_leads_to_its_twin(site, visits):
    for (language, name), facts in visits.items():
        assert facts["language"] == language
        assert facts["twin"] == f"{site}/{TWIN[language]}/{name}.html"
        assert (TWIN[language], name) in visits


def test_the_switch_can_be_clicked(site, chromium):
    page = chromium.new_page()
    page.goto(f"{site}/en/01_hierarchy.html")
    for language in ("ko", "en"):
        with page.expect_navigation() as navigation:
            page.click(".naranhi-twin")
        assert navigation.value.status == 200
        assert page.url == f"{site}/{language}/01_hierarchy.html"
        assert page.get_attribute("html", "lang") == language
    page.close()


@pytest.mark.parametrize(
    ("locale", "language"), [("ko-KR", "ko"), ("en-GB", "en"), ("fr-FR", "en"), ("ko", "ko")]
)
def test_the_landing_page_picks_by_the_browsers_language(site, chromium, locale, language):
    context = chromium.new_context(locale=locale)
    page = context.new_page()
    page.goto(f"{site}/")
    page.wait_for_url(f"{site}/{language}/welcome.html")
    context.close()


def test_the_landing_page_works_without_scripts(site, chromium):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}/")
    for language in TWIN:
        assert page.locator(f"a[href='{language}/welcome.html']").is_visible()
    context.close()


def search(page, site: str, language: str, word: str) -> set[str]:
    """The names of the pages that a search finds, asked as a reader asks it."""
    page.goto(f"{site}/{language}/welcome.html")
    page.click(".search-button-field")
    page.fill("#pst-search-dialog input", word)
    page.press("#pst-search-dialog input", "Enter")
    page.wait_for_url(f"{site}/{language}/search.html*")
    # The status is written last. (The pulse that says "searching" may go on after that: Sphinx's
    # stopPulse does not clear the timer, which then starts it again.)
    page.wait_for_function("() => Search.status?.textContent")
    links = page.locator("#search-results ul.search a")
    return {
        link.split("#")[0].removesuffix(".html")
        for link in links.evaluate_all("(all) => all.map((link) => link.getAttribute('href'))")
    }


@pytest.mark.parametrize("word", ["버블", "대역폭", "통신", "all_reduce", "bandwidth"])
def test_search_finds_the_pages_that_have_the_word(site, chromium, visits, word):
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    anywhere = set()
    for language in TWIN:
        pages = {name for (code, name), facts in visits.items() if code == language}
        having = {name for name in pages if word in visits[language, name]["text"]}
        assert search(page, site, language, word) == having
        anywhere |= having
    assert anywhere, f"no page has {word}"
    context.close()


def test_search_finds_nothing_where_nothing_is(site, chromium):
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    for word in ("뷁쀍", "xyzzyplugh"):
        assert search(page, site, "ko", word) == set()
    context.close()


def test_a_page_marks_the_word_that_led_to_it(site, chromium):
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    assert "glossary" in search(page, site, "ko", "버블")
    page.click("#search-results a[href='glossary.html']")
    page.wait_for_selector("article .highlighted")
    assert page.locator("article .highlighted").first.inner_text() == "버블"
    context.close()


def test_no_request_leaves_the_host(site, visits):
    asked = {url for facts in visits.values() for url in facts["requests"]}
    assert [url for url in asked if not url.startswith((site, "data:"))] == []
    assert any("mathjax" in url for url in asked)  # it is served, so it comes from here


def test_nothing_in_the_pages_names_another_host_to_load_from(site):
    loads = re.compile(
        r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//"
        r"|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//"
        r"|@import|url\([\"']?(?:https?:)?//|\b(?:unpkg|jsdelivr|cdnjs|googleapis|gstatic)\."
    )
    for path in sorted(HTML.glob("**/*.html")):
        assert not loads.search(path.read_text()), path


def test_no_error_is_said(visits):
    for where, facts in visits.items():
        assert [entry for entry in facts["said"] if entry[0] in ("error", "warning")] == [], where


def test_no_page_is_wider_than_a_phone(visits):
    wide = {where: facts["width"] for where, facts in visits.items()}
    assert {where: width for where, width in wide.items() if width > PHONE["width"]} == {}


def test_exactly_one_search_field(visits):
    assert {where: facts["fields"] for where, facts in visits.items() if facts["fields"] != 1} == {}


def test_formulas_are_rendered(visits):
    assert sum(facts["rendered"] for facts in visits.values()) > 0
    for where, facts in visits.items():
        assert facts["rendered"] == facts["formulas"] and facts["broken"] == 0, where


def test_no_markup_is_left_in_the_prose(visits):
    # In Markdown *단어(word)*를 is not emphasised: a letter follows the closing star.
    left = re.compile(r"\*\S|\S\*|\{(?:numref|ref|eq|term|cite\S*|doc)\}|`|\]\(|:::|\$\S")
    found = {
        where: texts
        for where, facts in visits.items()
        if (texts := [text for text in facts["prose"] if left.search(text)])
    }
    assert found == {}


def test_labels_of_korean_pages_are_korean(visits):
    """Or names, such as GPipe, which is what a chapter is called."""
    names = {
        cell.source.partition("\n")[0].removeprefix("# ")
        for path in (REPOSITORY / "notebooks/ko").glob("*.ipynb")
        for cell in nbformat.read(path, as_version=4).cells[:1]
    }
    for (language, name), facts in visits.items():
        if language == "ko":
            labels = [re.sub(r"^\d+\. ", "", label) for label in facts["labels"]]
            wrong = [one for one in labels if not HANGUL.search(one) and one not in names]
            assert wrong == [], name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_mode_follows_the_system_and_toggles(site, chromium, scheme):
    context = chromium.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{site}/ko/welcome.html")

    def look() -> tuple:
        return page.evaluate(
            "() => { const style = getComputedStyle(document.documentElement);"
            " return [document.documentElement.dataset.theme,"
            " getComputedStyle(document.body).backgroundColor,"
            " style.getPropertyValue('--naranhi-ink'), style.getPropertyValue('--naranhi-faint')] }"
        )

    before = look()
    assert before[0] == scheme
    page.click(".theme-switch-button")
    after = look()
    assert after[0] != scheme
    assert all(old != new for old, new in zip(before, after, strict=True))
    page.goto(f"{site}/en/glossary.html")
    assert look() == after  # the choice holds on the next page
    context.close()


def chapters() -> list[str]:
    return sorted(path.stem for path in (REPOSITORY / "notebooks" / "en").glob("*.ipynb"))


def test_a_chapter_downloads_as_its_executed_notebook(site, visits):
    assert chapters()
    for language in TWIN:
        for name in chapters():
            path = visits[language, name]["download"].removeprefix(site + "/")
            assert path.endswith(f"/{name}.ipynb")
            source = REPOSITORY / "notebooks" / language / f"{name}.ipynb"
            notebook, ours = (nbformat.read(one, as_version=4) for one in (HTML / path, source))
            assert [c.source for c in notebook.cells] == [c.source for c in ours.cells]
            assert any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("language", TWIN)
def test_the_download_can_be_clicked(site, chromium, language):
    page = chromium.new_page()
    page.goto(f"{site}/{language}/01_hierarchy.html")
    with page.expect_download() as download:
        page.click(".naranhi-download")
    assert download.value.suggested_filename == "01_hierarchy.ipynb"
    nbformat.reads(Path(download.value.path()).read_text(), as_version=4)
    page.close()


def test_a_chapter_is_stamped_with_its_execution(visits):
    for (language, name), facts in visits.items():
        if name not in chapters():
            assert facts["stamp"] is None, name
            continue
        executed = json.loads((REPOSITORY / f"_build/executed/{name}.ipynb").read_text())
        record = executed["metadata"]["naranhi"]["executed"]
        for fact in ("date", "machine", "torch", "commit"):
            assert (record[fact] or "") in facts["stamp"], language  # no commit outside of git
        assert ("GPU" if "nccl" in record["backends"] else "CPU") in facts["stamp"]


def test_an_answer_is_folded_until_it_is_asked_for(visits):
    label = {"en": "Show the answer", "ko": "답 펼치기"}
    for (language, name), facts in visits.items():
        if name in chapters():
            found = facts["answers"]
            assert found["number"] >= 2  # two exercises or more
            assert found["label"] == label[language]
            assert (found["before"], found["after"]) == (False, True)


@pytest.mark.parametrize(
    "language, title, stamp",
    [
        ("en", "On 1 × NVIDIA H100", "not executed yet"),
        ("ko", "1 × NVIDIA H100 80GB HBM3에서 실행한 결과", "아직 실행하지 않음"),
    ],
)
def test_what_a_gpu_recorded_is_folded_below_the_cell(site, chromium, language, title, stamp):
    page = chromium.new_page()
    page.goto(f"{site}/{language}/04_overlap.html")
    records = page.locator("details.naranhi-record")
    assert records.count() > 2
    assert records.first.locator("summary").inner_text().startswith(title)
    assert not records.first.locator("pre").first.is_visible()
    records.first.locator("summary").click()
    assert records.first.locator("pre").first.is_visible()
    assert "H100" in page.locator(".naranhi-recorded").inner_text()
    page.goto(f"{site}/{language}/02_collectives.html")
    assert stamp in page.locator(".naranhi-recorded").inner_text()
    assert not page.locator("details.naranhi-record").count()
    page.close()
