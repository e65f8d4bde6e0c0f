"""The built site in a real browser: headless Chromium, the site served on loopback."""

import fcntl
import json
import re
import unicodedata
from pathlib import Path

import execution
import host_network
import localize
import nbformat
import pytest
import render
import torch
from accessibility import violations
from particles import misfits

from naranhi import check

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOKS = REPOSITORY / "notebooks"
HTML = REPOSITORY / "_build" / "html"
TWIN = {"en": "ko", "ko": "en"}
PHONE = {"width": 360, "height": 740}
ZOOMED = {"width": 320, "height": 740}  # a screen of 1280 at 400%
DESK = {"width": 1280, "height": 900}
SHEET = {"width": 718, "height": 1050}  # A4, between the margins that a browser leaves
HANGUL = re.compile("[가-힣]")

pytestmark = pytest.mark.timeout(1800)


def names(language: str) -> list[str]:
    pages = sorted(path.stem for path in (HTML / language).glob("*.html"))
    return [page for page in pages if page != "index"]


SHIFT = """() => new Promise((done) => {
  let shift = 0;
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => { shift += entry.value; }))
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(shift), 100);
})"""
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
  numbers: [...document.querySelectorAll(
      "h1 .section-number, .caption-number, .bd-sidebar-primary .current.active > a")]
    .flatMap((place) => place.textContent.match(/\\d+/) ?? []),
  counted: document.querySelectorAll(":is(h2, h3, h4) .section-number").length,
  anchors: [...document.querySelectorAll("article section section[id]")].map((one) => one.id),
  unreachable: [...document.querySelectorAll(
      ".cell_output :is(pre, .text_html, .text_html > div), div.highlight pre"
      + ", .pst-scrollable-table-container"
      + ", .naranhi-predictions, .naranhi-lab-picture, .naranhi-lab-picture > div")]
    .filter((region) => region.checkVisibility() && region.scrollWidth > region.clientWidth + 1
      && ["auto", "scroll"].includes(getComputedStyle(region).overflowX)
      && !(region.tabIndex === 0 && region.ariaLabel
        && getComputedStyle(region).boxShadow !== "none")).length,
  cut: [...document.querySelectorAll("article :is(span.math mjx-container, .naranhi-joined)")]
    .filter((formula) => !formula.closest("table")
      && formula.getBoundingClientRect().right > innerWidth)
    .map((formula) => formula.closest("[id]").id),
  clipped: [...document.querySelectorAll("article span.math")]
    .filter((formula) => formula.scrollWidth > formula.clientWidth + 1
      && getComputedStyle(formula).overflowX === "hidden")
    .map((formula) => formula.closest("[id]").id),
  joined: document.querySelectorAll(".naranhi-joined").length,
  parted: [...document.querySelectorAll(".naranhi-joined")]
    .filter((one) => one.checkVisibility() && one.lastChild.nodeType === Node.TEXT_NODE)
    .filter((one) => {
      const [formula, after] = [one.querySelector("mjx-container"), document.createRange()];
      after.selectNodeContents(one.lastChild);
      return after.getBoundingClientRect().left < formula.getBoundingClientRect().right - 1;
    }).map((one) => one.closest("[id]").id),
  folds: [...document.querySelectorAll("article details > summary")]
    .map((label) => (label.querySelector(".collapsed") ?? label).textContent.trim()),
  names: Math.max(0, ...[
    ...document.querySelectorAll(".pst-scrollable-table-container td:first-child")]
    .map((cell) => cell.offsetWidth)),
  broken: document.querySelectorAll("mjx-merror, .problematic").length,
  twice: [...document.querySelectorAll("article [id]")].map((one) => one.id)
    .filter((id, place, ids) => ids.indexOf(id) !== place),
  stops: [...document.querySelectorAll(".math, mjx-container")]
    .filter((one) => one.tabIndex === 0 && one.scrollWidth <= one.clientWidth + 1).length,
  landmarks: document.querySelectorAll("[role=region]").length,
  here: [...document.querySelectorAll(".bd-sidebar-primary [aria-current=page]")].length,
  copies: document.querySelector(".copybtn title")?.textContent,
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
                "shift": page.evaluate(SHIFT),
                "requests": requests,
                "said": said,
                "answers": answers(page),
                "zoomed": width(page, ZOOMED),
            }
            page.close()
    context.close()
    return found


def width(page, viewport: dict[str, int]) -> int:
    page.set_viewport_size(viewport)
    return page.evaluate("document.documentElement.scrollWidth")


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


@pytest.mark.parametrize("language, book", [("en", "Naranhi"), ("ko", "나란히")])
def test_titles_name_the_page_and_the_book_once(site, language, book):
    titles = {
        name: re.search("<title>(.*?)</title>", (HTML / language / f"{name}.html").read_text())[1]
        for name in names(language)
    }
    assert len({*titles.values()}) == len(titles) and titles["welcome"] == book
    assert all(title.count(book) == 1 for title in titles.values())


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


def test_a_chapter_is_numbered_as_its_file_is(visits):
    for (language, name), facts in visits.items():
        if name in chapters():
            assert {*map(int, facts["numbers"])} == {int(name[:2])}, (language, name)
            assert facts["counted"] == 0, "a section has the number of its chapter"


def test_sections_have_the_same_addresses_in_both_languages(visits):
    for name in [page for page in names("en") if page != "search"]:
        english, korean = (visits[language, name]["anchors"] for language in ("en", "ko"))
        assert english == korean, name
        assert len(english) > (5 if name in chapters() else 2), name
        assert not any(re.fullmatch(r"id\d+", one) for one in english), name


def test_the_switch_keeps_the_place(site, chromium):
    page = chromium.new_page(viewport=DESK)
    page.goto(f"{site}/ko/06_gpipe.html", wait_until="networkidle")
    page.locator("#bubble").evaluate("(section) => section.scrollIntoView()")
    button = page.locator(".naranhi-twin").bounding_box()
    page.mouse.click(button["x"] + 5, button["y"] + 5)  # `click` would scroll the page first
    page.wait_for_url(f"{site}/en/06_gpipe.html#bubble")
    page.wait_for_function("() => scrollY > 1000")
    page.close()


def test_the_switch_keeps_the_settings_of_a_lab(site, chromium):
    page = chromium.new_page(viewport=DESK)
    settings = "#lab-schedule&stages=6"
    page.goto(f"{site}/en/lab.html{settings}")
    with page.expect_navigation():
        page.click(".naranhi-twin")
    assert page.url == f"{site}/ko/lab.html{settings}"
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
    page.wait_for_selector("#search-results [role=status]")
    return set(json.loads(page.get_attribute("#search-results", "data-pages")))


@pytest.mark.parametrize("word", ["버블", "대역폭", "통신", "all_reduce", "bandwidth"])
def test_search_finds_the_pages_that_have_the_word(site, chromium, visits, word):
    context = chromium.new_context(viewport=DESK)
    page = context.new_page()
    anywhere = set()
    for language in TWIN:
        pages = {name for (code, name), facts in visits.items() if code == language}
        having = {name for name in pages if word in visits[language, name]["text"]}
        assert search(page, site, language, word) == having
        anywhere |= having
    assert anywhere, f"no page has {word}"
    context.close()


FORMS = {
    "memory": ["memory", "memories"],
    "batches": ["batch", "batches", "batching", "batched"],
    "latencies": ["latency", "latencies"],
}


@pytest.mark.parametrize("word", FORMS)
def test_search_finds_the_other_forms_of_an_english_word(site, chromium, visits, word):
    page = chromium.new_page(viewport=DESK)
    forms = re.compile(rf"(?<![^\W_])(?:{word}|(?:{'|'.join(FORMS[word])})(?![a-z]))")
    for language in TWIN:
        pages = {name for (code, name), facts in visits.items() if code == language}
        having = {name for name in pages if forms.search(visits[language, name]["text"])}
        assert having and search(page, site, language, word) == having
    page.close()


# What readers type, and where the first hit may lead.
QUERIES = {
    "en": {
        "communication cost": "03",
        "bubble": "06 glossary",
        "pipeline bubble size": "06",
        "tensor parallelism": "13 glossary",
        "ring all-reduce": "02 03",
        "zero stage 3": "12 18",
        "fsdp": "12 17",
        "1F1B": "08 glossary",
        "gpipe": "06 glossary",
        "activation memory": "07 glossary",
        "recomputation": "06 07 glossary",
        "memory hierarchy": "01 glossary",
        "gpu memories": "01 07 12 glossary",
        "loss scaling": "19 glossary",
        "bf16": "19 glossary",
        "gradient accumulation": "11 18 glossary",
        "weight stashing": "09 glossary",
        "install": "how 18 welcome",
        "slurm": "how 17 18",
        "torchrun two nodes": "17 18",
        "sequence parallelism": "13 glossary",
        "deepspeed config": "18",
        "deadlock": "02 glossary",
        "bandwidth latency": "03 01 glossary",
        "bucket size": "11 glossary",
        "which mesh": "16",
    },
    "ko": {
        "통신 비용": "03",
        "버블": "06 glossary",
        "파이프라인 버블": "06 glossary",
        "텐서 병렬화": "13 glossary",
        "집합 통신": "02 glossary",
        "링 all-reduce": "02 03",
        "ZeRO 3단계": "12 18",
        "1F1B": "08 glossary",
        "마이크로배치": "06 glossary",
        "활성화 메모리": "07 glossary",
        "재계산": "06 07 glossary",
        "memory": "01 07 12 glossary",
        "메모리 계층": "01 glossary",
        "손실 스케일링": "19 glossary",
        "혼합 정밀도": "19 glossary",
        "그래디언트 누적": "11 18 glossary",
        "가중치 스태싱": "09 glossary",
        "제로 버블": "10 glossary",
        "설치": "how 18 welcome",
        "Slurm": "how 17 18",
        "노드 두 개": "17 18",
        "시퀀스 병렬화": "13 glossary",
        "교착 상태": "02 glossary",
        "대역폭": "03 01 glossary",
        "버킷 크기": "11 glossary",
        "버블을": "06 glossary",
    },
}


@pytest.mark.parametrize("language", QUERIES)
def test_the_first_hit_is_right_for_five_queries_of_six(site, chromium, language):
    page, wrong = chromium.new_page(), {}
    for query, right in QUERIES[language].items():
        page.goto(f"{site}/{language}/search.html?q={query}")
        page.wait_for_selector("#search-results [role=status]")
        first = page.get_attribute("#search-results ol a", "href")
        if not first.startswith(tuple(right.split())):
            wrong[query] = first
        # Each hit says where it is and shows a sentence of its section.
        assert (
            page.locator("#search-results li:has(a[href*='#']):not(:has(span, mark))").count() == 0
        )
    assert len(wrong) <= len(QUERIES[language]) / 6, wrong
    page.close()


def test_search_finds_nothing_where_nothing_is(site, chromium):
    context = chromium.new_context(viewport=DESK)
    page = context.new_page()
    for word in ("뷁쀍", "xyzzyplugh"):
        assert search(page, site, "ko", word) == set()
    context.close()


def test_search_reads_hangul_in_parts_and_needs_no_new_browser(site, chromium):
    """As a name pasted from macOS has it; `Map.groupBy` is of 2024."""
    page = chromium.new_page()
    page.add_init_script("delete Map.groupBy")
    for query in (unicodedata.normalize("NFD", "통신"), "bandwidth"):
        page.goto(f"{site}/ko/search.html?q={query}")
        page.wait_for_selector("#search-results ol a")
    page.click(".naranhi-twin")
    assert page.url == f"{site}/en/search.html?q=bandwidth"
    page.close()


def test_no_hit_shows_commands_of_tex(site, chromium):
    page = chromium.new_page()
    for language in TWIN:
        page.goto(f"{site}/{language}/search.html")
        prose = page.evaluate("SECTIONS.map((one) => one.slice(2, 5).join(' '))")
        assert len(prose) > 300 and [text for text in prose if re.search(r"\\[a-z]+\{", text)] == []
    page.close()


def test_letters_of_a_query_are_not_marked_all_over_a_page(site, chromium):
    page = chromium.new_page()
    page.goto(f"{site}/en/search.html?q=bubble p")
    page.wait_for_selector("#search-results [role=status]")
    page.goto(f"{site}/en/06_gpipe.html")
    page.wait_for_selector("article .highlighted")
    words = page.locator("article .highlighted").all_text_contents()
    assert {word.lower() for word in words if word} == {"bubble"}  # in a picture, without text
    page.close()


def test_a_page_marks_the_word_that_led_to_it(site, chromium):
    context = chromium.new_context(viewport=DESK)
    page = context.new_page()
    assert "glossary" in search(page, site, "ko", "버블")
    page.click("#search-results a[href='glossary.html#term-bubble']")
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
    wide = {where: facts["zoomed"] for where, facts in visits.items()}
    assert {where: width for where, width in wide.items() if width > ZOOMED["width"]} == {}


def test_the_names_of_rows_leave_room_for_what_they_name(visits):
    """In a table of words, on a phone, the first column takes half of the screen at most."""
    wide = {where: facts["names"] for where, facts in visits.items()}
    assert any(wide.values())
    assert {where: width for where, width in wide.items() if width > PHONE["width"] / 2} == {}


def test_exactly_one_search_field(visits):
    assert {where: facts["fields"] for where, facts in visits.items() if facts["fields"] != 1} == {}


def test_formulas_are_rendered(visits):
    assert sum(facts["rendered"] for facts in visits.values()) > 0
    for where, facts in visits.items():
        assert facts["rendered"] == facts["formulas"] and facts["broken"] == 0, where


def test_no_markup_is_left_in_the_prose(visits):
    # In Markdown *단어(word)*를 is not emphasized: a letter follows the closing star.
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
            " return [document.documentElement.dataset.theme, style.colorScheme,"
            " getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('article h1')).color] }"
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


BACKGROUND = {"light": "rgb(253, 253, 252)", "dark": "rgb(19, 23, 27)"}


@pytest.mark.parametrize("scheme", BACKGROUND)
@pytest.mark.parametrize("scripts", [False, "none of the theme's"])
def test_the_first_paint_has_the_right_colours(site, chromium, scheme, scripts):
    """Before the theme's deferred scripts have run, and where scripts do not run at all."""
    context = chromium.new_context(color_scheme=scheme, java_script_enabled=bool(scripts))
    page = context.new_page()
    page.route(lambda url: "_static/scripts/" in url, lambda route: route.abort())
    page.goto(f"{site}/en/06_gpipe.html")
    body = page.locator("body")
    assert body.evaluate("(body) => getComputedStyle(body).backgroundColor") == BACKGROUND[scheme]
    assert "Naranhi" not in body.evaluate("(body) => getComputedStyle(body).fontFamily")
    context.close()


def test_without_storage_all_buttons_work(site, chromium):
    context = chromium.new_context(viewport=PHONE, color_scheme="dark")
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(error.stack))
    page.add_init_script(
        """for (const name of ["localStorage", "sessionStorage"])
          Object.defineProperty(window, name, { get() { throw new Error("denied"); } });"""
    )
    page.goto(f"{site}/en/06_gpipe.html")
    shown = "() => document.documentElement.dataset.theme"
    themes = [page.evaluate(shown)]
    for _ in range(2):
        page.locator(".theme-switch-button:visible").click()
        themes.append(page.evaluate(shown))
    assert {*themes} == {"light", "dark"}
    page.locator(".search-button:visible").click()
    page.wait_for_selector("#pst-search-dialog[open]")
    page.keyboard.press("Escape")
    page.locator(".primary-toggle:visible").click()
    page.wait_for_selector("#pst-primary-sidebar-modal[open]")
    assert errors == []
    context.close()


def test_nothing_moves_while_a_page_loads(visits):
    for name, facts in visits.items():
        assert facts["shift"] < 0.1, name


def test_icons_are_drawn_once(site, chromium, visits):
    assert not any(
        "fontawesome.js" in one for facts in visits.values() for one in facts["requests"]
    )
    assert not list(HTML.glob("*/_static/scripts/fontawesome.js*"))
    page = chromium.new_page(viewport=DESK)
    page.goto(f"{site}/en/06_gpipe.html", wait_until="networkidle")
    drawn = "(icon) => getComputedStyle(icon, '::before').fontFamily + icon.offsetWidth"
    assert re.match('"Font Awesome.*[1-9]', page.locator(".fa-download").evaluate(drawn))
    page.close()


def test_the_focus_can_be_seen(site, chromium):
    page = chromium.new_page(viewport=DESK)
    page.goto(f"{site}/en/06_gpipe.html", wait_until="networkidle")
    page.locator(".naranhi-twin").focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    for control in (".naranhi-twin", ".naranhi-download"):
        style = page.locator(control).evaluate("(one) => getComputedStyle(one).outline")
        assert "solid 3px" in style, (control, style)
        page.keyboard.press("Tab")
    page.close()


def test_what_scrolls_can_be_reached_by_the_keyboard(visits):
    for name, facts in visits.items():
        assert facts["unreachable"] == 0, name


def test_nothing_else_is_on_the_way(visits):
    """Neither a formula that needs no scrolling, nor a landmark for each piece of code."""
    for name, facts in visits.items():
        assert (facts["stops"], facts["landmarks"]) == (0, 0), name


def test_a_formula_in_a_line_that_scrolls_can_be_reached(site, chromium):
    page = chromium.new_page(viewport=ZOOMED)
    page.goto(f"{site}/en/09_pipedream.html", wait_until="networkidle")
    wide = page.wait_for_selector("span.math.naranhi-more")
    assert wide.get_attribute("tabindex") == "0" and wide.get_attribute("aria-label")
    page.set_viewport_size(DESK)
    page.wait_for_function("(formula) => formula.tabIndex === -1", arg=wide)
    page.close()


def test_no_address_is_there_twice(visits):
    assert {where: facts["twice"] for where, facts in visits.items() if facts["twice"]} == {}


def test_the_contents_say_which_page_is_open(visits):
    for where, facts in visits.items():
        assert facts["here"] == (where[1] not in ("search", "welcome")), where


def test_a_copy_button_is_named_in_the_pages_language(visits):
    for language, name in (("en", "Copy to clipboard"), ("ko", "복사")):
        assert {facts["copies"] for (code, _), facts in visits.items() if code == language} == {
            name,
            None,
        }


def test_a_button_that_is_pressed_by_the_keyboard_keeps_the_focus(site, chromium):
    page = chromium.new_page(viewport=PHONE)
    page.goto(f"{site}/ko/06_gpipe.html", wait_until="networkidle")
    focused = "(button) => button === document.activeElement"
    for opener, opened, name in (
        (".primary-toggle", "#pst-primary-sidebar-modal", "차례"),
        (".secondary-toggle", "#pst-secondary-sidebar-modal", "이 페이지의 차례"),
        (".search-button", "#pst-search-dialog", "검색"),
    ):
        button = page.locator(f"{opener}:visible")
        button.press("Enter")
        assert page.locator(f"{opened}[open]").get_attribute("aria-label") == name
        page.keyboard.press("Escape")
        page.wait_for_selector(f"{opened}:not([open])", state="attached")
        assert button.evaluate(focused), opener
    colours = page.locator(".theme-switch-button:visible")
    before = colours.get_attribute("aria-label")
    colours.press("Enter")
    assert colours.evaluate(focused)
    assert colours.get_attribute("aria-label") != before, "it says which colours it has set"
    page.close()


def test_without_scripts_no_button_is_there_that_needs_them(site, chromium):
    context = chromium.new_context(viewport=PHONE, java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}/en/06_gpipe.html")
    assert page.locator("button:visible").count() == 0
    context.close()


def test_with_forced_colours_the_focus_can_be_seen(site, chromium):
    context = chromium.new_context(viewport=DESK, forced_colors="active")
    page = context.new_page()
    page.goto(f"{site}/en/06_gpipe.html", wait_until="networkidle")
    for links in (".bd-sidebar-primary nav a", ".bd-sidebar-secondary nav a"):
        page.locator(links).nth(1).focus()
        page.keyboard.press("Tab")
        drawn = page.evaluate("getComputedStyle(document.activeElement).outline")
        assert "solid 3px" in drawn, links
    context.close()


def test_a_formula_in_a_line_is_no_wider_than_a_phone(visits):
    """It cannot scroll, nor break."""
    for name, facts in visits.items():
        assert facts["cut"] == [], name
        assert facts["clipped"] == [], name


def test_what_follows_a_formula_is_in_its_line(visits):
    """A comma, or a particle of Korean, does not begin the next line."""
    for language in TWIN:
        assert sum(facts["joined"] for (code, _), facts in visits.items() if code == language) > 200
    assert {where: facts["parted"] for where, facts in visits.items() if facts["parted"]} == {}


def test_each_fold_of_a_page_has_a_label_of_its_own(visits):
    """Which is more than that neighbours differ: a screen reader may list all of a page."""
    for where, facts in visits.items():
        twice = {label for label in facts["folds"] if facts["folds"].count(label) > 1}
        assert twice == set(), where


def test_no_command_of_tex_is_left_in_prose(visits):
    for name, facts in visits.items():
        assert re.findall(r"\\[A-Za-z]{2,}", " ".join(facts["prose"])) == [], name


def test_a_formula_that_scrolls_shows_it(site, chromium):
    page = chromium.new_page(viewport=PHONE)
    page.goto(f"{site}/en/10_interleaved_zero_bubble.html", wait_until="networkidle")
    wide = page.wait_for_selector("div.math > mjx-container.naranhi-more")
    assert wide.get_attribute("role") == "group" and wide.get_attribute("aria-label")
    wide.evaluate("formula => { formula.scrollLeft = 9999; }")
    page.wait_for_function("formula => !formula.matches('.naranhi-more')", arg=wide)
    page.close()


def test_the_headings_at_the_side_are_whole(site, chromium):
    page = chromium.new_page(viewport=DESK)
    page.goto(f"{site}/en/troubleshooting.html#trouble-python", wait_until="networkidle")
    page.locator(".bd-sidebar-secondary li li code").first.wait_for()
    beyond = (
        "(items) => items.filter((one) => one.getBoundingClientRect().right > innerWidth).length"
    )
    assert page.locator(".bd-sidebar-secondary li :is(.pre, a)").evaluate_all(beyond) == 0
    page.close()


@pytest.mark.parametrize(
    ("language", "scheme", "viewport"), [("en", "dark", PHONE), ("ko", "light", DESK)]
)
def test_axe_finds_nothing_serious(site, chromium, language, scheme, viewport):
    """On each page in one language: both have the same elements."""
    context = chromium.new_context(viewport=viewport, color_scheme=scheme)
    page, found = context.new_page(), {}
    for name in names(language)[[*TWIN].index(language) :: 2]:
        page.goto(f"{site}/{language}/{name}.html", wait_until="networkidle")
        part = None
        # The colours of code are the same everywhere, and its thousands of words take seconds.
        if not name.startswith(("01", "02")):
            part = {"exclude": [["pre"]]}
            page.eval_on_selector_all(
                "pre", "(all) => all.forEach((one) => { one.textContent = one.textContent; })"
            )
        for violation in violations(page, part):
            if violation["impact"] in ("serious", "critical"):
                places = [node["html"][:120] for node in violation["nodes"]]
                found[name, violation["id"]] = places[:3]
    assert found == {}
    context.close()


def test_paper_has_the_answers(site, chromium):
    page = chromium.new_page()
    page.goto(f"{site}/ko/06_gpipe.html", wait_until="networkidle")
    answer = page.locator(".tag_hide-cell pre").first
    assert not answer.is_visible()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert answer.is_visible()
    assert not page.locator(".tag_hide-cell summary").first.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not answer.is_visible()
    page.close()


CUT = """() => [...document.querySelectorAll("article *")]
  .filter((one) => !one.closest("svg, mjx-container") && one.checkVisibility()
    && getComputedStyle(one).overflowX !== "visible"
    && (one.scrollWidth > one.clientWidth + 2 || getComputedStyle(one).boxShadow !== "none"))
  .map((one) => one.textContent.trim().slice(0, 40))"""


@pytest.mark.parametrize("name", ["06_gpipe", "23_planning"])
def test_paper_cuts_no_code_and_no_table(site, chromium, name):
    page = chromium.new_page(viewport=SHEET)
    page.goto(f"{site}/en/{name}.html", wait_until="networkidle")
    page.wait_for_selector(".naranhi-more")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(CUT) == []
    page.close()


COLORS = """() => ["article p", "div.highlight .k", ".cell_output svg text"].map((part) => {
  const one = document.querySelector(part);
  return getComputedStyle(one)[one.matches("svg text") ? "fill" : "color"];
}).concat(getComputedStyle(document.body).backgroundColor)"""


@pytest.mark.parametrize("scripts", [True, False])
def test_paper_has_the_colours_of_a_light_page(site, chromium, scripts):
    found = {}
    for scheme in BACKGROUND:
        context = chromium.new_context(color_scheme=scheme, java_script_enabled=scripts)
        page = context.new_page()
        page.goto(f"{site}/en/06_gpipe.html", wait_until="networkidle")
        before = page.evaluate(COLORS)
        page.emulate_media(media="print", color_scheme=scheme)
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        found[scheme] = page.evaluate(COLORS)
        page.emulate_media(media="screen", color_scheme=scheme)
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate(COLORS) == before
        context.close()
    assert found["dark"] == found["light"]
    assert found["light"][-1] == "rgb(255, 255, 255)"


@pytest.mark.parametrize("address", ["nowhere.html", "en/nowhere.html", "book/ko/far/away.html"])
def test_an_address_without_a_page_leads_back_into_the_book(site, chromium, address):
    page = chromium.new_page()
    text = (HTML / "404.html").read_text()
    page.route(
        f"{site}/{address}",
        lambda route: route.fulfill(status=404, body=text, content_type="text/html"),
    )
    page.goto(f"{site}/{address}")
    home = site + "/" + ("book/" if address.startswith("book/") else "")
    for language in TWIN:
        link = page.locator(f"a[lang={language}]")
        assert link.evaluate("(link) => link.href") == f"{home}{language}/welcome.html"
    page.close()


def test_a_published_book_is_found_from_any_address(site, chromium):
    """Of an address that names no language the page cannot tell where the book begins."""
    text = render.not_found("welcome", "https://example.org/naranhi/")
    page = chromium.new_page()
    address = f"{site}/naranhi/de/nowhere.html"
    page.route(
        address, lambda route: route.fulfill(status=404, body=text, content_type="text/html")
    )
    page.goto(address)
    link = page.locator("a[lang=ko]")
    assert link.evaluate("(link) => link.href") == f"{site}/naranhi/ko/welcome.html"
    page.close()


def chapters() -> list[str]:
    return sorted(path.stem for path in (REPOSITORY / "notebooks" / "en").glob("*.ipynb"))


RAW = re.compile(
    r"\{(?:numref|ref|eq|term|cite\S*|doc)\}`|\[\]\(|^:::|^% \w+:|^\([\w-]+\)=$", re.MULTILINE
)


def test_a_chapter_downloads_as_its_executed_notebook(site, visits):
    assert chapters()
    for language in TWIN:
        for name in chapters():
            path = visits[language, name]["download"].removeprefix(site + "/")
            assert path.endswith(f"/{name}.ipynb")
            source = REPOSITORY / "notebooks" / language / f"{name}.ipynb"
            notebook, ours = (nbformat.read(one, as_version=4) for one in (HTML / path, source))
            code = [
                [c.source for c in one.cells if c.cell_type == "code"] for one in (notebook, ours)
            ]
            assert code[0] == code[1]
            assert any(cell.get("outputs") for cell in notebook.cells)
            # It is read outside of the book, where nobody resolves what only Sphinx knows.
            prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
            assert not re.search(RAW, prose), re.search(RAW, prose)
            # Numbers of figures and equations are known only here.
            assert language != "ko" or misfits(prose) == []


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


@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("en/*.ipynb")))
def test_outputs_are_korean_on_korean_pages(site, name):
    notebook, missing = render.with_outputs(NOTEBOOKS / f"ko/{name}.ipynb", REPOSITORY, "ko")
    assert missing == [], f"they have no entry in book/ko/outputs/{name}.yml"
    said = "".join(str(cell.get("outputs")) for cell in notebook.cells)
    assert HANGUL.search(said) and "✓ the " not in said


def test_no_address_of_the_host_changes_meanwhile():
    """Or Chromium would drop what it is loading."""
    with host_network.LOCK.open("a") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def said_of_false_claims(capsys):
    """The entries for what the book says of a claim about times that is false on this machine."""
    claims = [
        lambda what: check.true(what, False, measured=True),
        lambda what: check.close(what, 0.5, 0.4, rtol=0.15, measured=True),
        lambda what: check.close(what, [1.0, 0.5], [1.0, 0.4], rtol=0.15, measured=True),
        lambda what: check.close(what, torch.arange(3.0), torch.ones(3), rtol=0.1, measured=True),
        lambda what: check.equal(what, 3, 2, measured=True),
        lambda what: check.equal(what, "slow", "quick", measured=True),
    ]
    catalogue = localize.load("ko", REPOSITORY, "06_gpipe")
    for claim in claims:
        claim("the measured bubble is that of the formula")
        (line,) = capsys.readouterr().out.splitlines()
        said = localize.claims(line, catalogue)
        assert said.startswith("✗ 측정한 버블이 공식과 같다: ")
        assert not re.search("[a-z]{2}", said.replace("slow", "").replace("quick", "")), said
    return catalogue.used


def test_each_entry_of_the_catalogue_says_something(site, capsys):
    folder = REPOSITORY / "book/ko/outputs"
    left = {path.stem: {*localize.read(path)} for path in folder.glob("*.yml")}
    for path in NOTEBOOKS.glob("en/*.ipynb"):
        notebook, _ = render.with_outputs(path, REPOSITORY, "en")
        catalogue = localize.load("ko", REPOSITORY, path.stem)
        localize.outputs(execution.code_cells(notebook), catalogue)
        for name in ("common", path.stem):
            left[name] -= catalogue.used
    pictures = localize.load("ko", REPOSITORY, "images")
    for path in REPOSITORY.glob("images/*.svg"):
        localize.page(path.read_text(encoding="utf-8"), pictures)
    for name in ("common", "images"):
        left[name] -= pictures.used
    left["common"] -= said_of_false_claims(capsys)
    for path in REPOSITORY.glob("book/recorded/*/one_gpu.json"):  # tables of no chapter
        catalogue = localize.load("ko", REPOSITORY, "one_gpu")
        for cell in json.loads(path.read_text())["cells"].values():
            for line in cell["outputs"][0]["text"].splitlines():
                for text in re.split(" {2,}", line):
                    catalogue.say(text, required=False)
        left["one_gpu"] -= catalogue.used
    assert {name: keys for name, keys in left.items() if keys} == {}


def test_the_pictures_of_the_first_page_speak_its_language(site, chromium):
    word = {"en": "step 1", "ko": "스텝 1"}
    for viewport in (PHONE, DESK):
        page = chromium.new_page(viewport=viewport)
        for language in TWIN:
            page.goto(f"{site}/{language}/welcome.html")
            shown = page.locator("article svg[role=img]:visible")
            assert shown.count() == 1
            words = shown.locator("text").all_text_contents()
            assert word[language] in words and word[TWIN[language]] not in words
        page.close()


def test_a_term_says_its_definition(site, chromium):
    page = chromium.new_page()
    for language, word in (("en", "nothing to do"), ("ko", "시간")):
        page.goto(f"{site}/{language}/06_gpipe.html")
        term = page.locator("a[href='glossary.html#term-bubble']").first
        assert word in term.get_attribute("title")
    page.close()


def test_an_answer_is_folded_until_it_is_asked_for(visits):
    label = {
        "en": r"Show the answer to exercise \d+( · 1 of \d)?",
        "ko": r"\d+번 답 펼치기( · 1/\d)?",
    }
    for (language, name), facts in visits.items():
        if name in chapters():
            found = facts["answers"]
            assert found["number"] >= 2  # two exercises or more
            # The first that is folded in chapter 22 answers a hunt, and not yet an exercise.
            if name != "22_silent_bugs":
                assert re.fullmatch(label[language], found["label"]), (name, found["label"])
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
    shown = records.first.locator("pre, table, svg").first
    assert not shown.is_visible()
    records.first.locator("summary").click()
    assert shown.is_visible()
    assert "H100" in page.locator(".naranhi-recorded").inner_text()
    page.goto(f"{site}/{language}/22_silent_bugs.html")
    assert stamp in page.locator(".naranhi-recorded").inner_text()
    assert not page.locator("details.naranhi-record").count()
    page.close()
