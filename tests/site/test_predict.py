"""Questions that the reader answers first, in headless Chromium: guess, formula, measurement."""

import json
import re
from functools import cache

import naranhi_predict
import nbformat
import pytest
from accessibility import violations

pytestmark = pytest.mark.timeout(1800)

ANSWER = re.compile(r'data-answer="([^"]*)"((?: data-\w+="[^"]*")+)')
PHONE = {"width": 390, "height": 844}
DEAF = "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no') } })"
KEPT = "() => localStorage.getItem('naranhi-predict')"
MARKS = """(root) => Object.fromEntries([...root.querySelectorAll("[data-output]")]
  .map((cell) => [cell.dataset.output, cell.dataset.value]))"""


@pytest.fixture(scope="module")
def asked(built):
    """Chapter -> name -> what its question says."""

    @cache
    def of(language):
        found = {}
        for path in sorted((built.parent / "stage" / language).glob("[0-9]*.ipynb")):
            text = "\n".join(
                cell.source
                for cell in nbformat.read(path, as_version=4).cells
                if cell.cell_type == "markdown"
            )
            comments = re.findall(r"^:class: predict\n((?:% .*\n)+)", text, re.MULTILINE)
            one = [naranhi_predict.asked(re.sub("^% ", "", each, flags=re.M)) for each in comments]
            found[path.stem] = {each["name"]: each for each in one}
        return found

    return of


@pytest.fixture(scope="module")
def answered(built):
    """Chapter -> name -> what the execution answered: the formula's number, and the measured."""
    found = {}
    for path in sorted((built.parent / "executed").glob("*.ipynb")):
        html = "".join(
            output.get("data", {}).get("text/html", "")
            for cell in nbformat.read(path, as_version=4).cells
            for output in cell.get("outputs", [])
        )
        found[path.stem] = {
            name: dict(re.findall(r'data-(\w+)="([^"]*)"', data))
            for name, data in ANSWER.findall(html)
        }
    return found


def truth(answer: dict[str, str]) -> str:
    return answer.get("measured", answer.get("formula"))


def test_each_question_has_its_answer_in_the_execution_and_on_its_axis(asked, answered):
    for language in ("en", "ko"):
        assert {page: [*names] for page, names in asked(language).items()} == {
            page: [*names] for page, names in answered.items()
        }
    for page, questions in asked("en").items():
        for name, question in questions.items():
            for number in map(float, answered[page][name].values()):
                if "choices" in question:
                    assert number in range(len(question["choices"])), name
                else:
                    assert question["range"][0] <= number <= question["range"][1], name


def test_fifty_answers_are_measured_and_each_chapter_has_two(answered):
    assert all(len(names) >= 2 for names in answered.values())
    measured = [name for names in answered.values() for name in names if "measured" in names[name]]
    assert len(measured) >= 50


@pytest.fixture
def page(chromium):
    context = chromium.new_context()
    page = context.new_page()
    page.said = []
    page.on("pageerror", lambda error: page.said.append(error.stack))
    yield page
    context.close()
    assert [stack for stack in page.said if "naranhi-predict" in stack] == []


def question(page, site, name="gpipe-larger", language="en", chapter="06_gpipe"):
    page.goto(f"{site}/{language}/{chapter}.html")
    return page.locator(f".naranhi-predict[data-predict={name}]")


def covered(page, name):
    return page.locator(f"[data-answer={name}]").first


@pytest.mark.parametrize("language", ["en", "ko"])
def test_a_guess_stands_beside_the_formula_and_the_measurement(page, site, answered, language):
    root = question(page, site, language=language)
    answer = answered["06_gpipe"]["gpipe-larger"]
    assert root.get_attribute("data-state") == "asking"
    assert not covered(page, "gpipe-larger").is_visible()
    root.locator("input[name=guess]").fill("12.5")
    root.locator("button[data-show]").click()
    assert root.get_attribute("data-state") == "shown"
    assert root.evaluate(MARKS) == {"guess": "12.5", **answer}
    places = root.locator(".naranhi-axis i").evaluate_all(
        "(all) => all.map((one) => one.style.left)"
    )
    numbers = [12.5, *map(float, answer.values())]
    assert [float(place.rstrip("%")) for place in places] == pytest.approx(numbers, abs=1e-3)
    ratio = float(answer["measured"]) / 12.5
    assert f"{ratio:.3g}" in root.locator("[role=status] p").inner_text()
    assert covered(page, "gpipe-larger").is_visible()
    assert not root.locator("form").is_visible()


def test_the_browser_keeps_guesses_and_the_map_counts_them_by_chapter(page, site, asked, answered):
    right = float(answered["06_gpipe"]["gpipe-larger"]["measured"])
    for name, guess in (
        ("gpipe-larger", right + 9.9),
        ("gpipe-recomputed", 399),
        ("gpipe-padding", None),
    ):
        root = question(page, site, name)
        if guess is None:
            root.locator("button[data-skip]").click()
        else:
            root.locator("input[name=guess]").fill(str(guess))
            root.locator("button[data-show]").click()
    root = question(page, site)  # the page once more
    assert root.get_attribute("data-state") == "shown"
    assert root.evaluate(MARKS)["guess"] == str(right + 9.9)
    assert covered(page, "gpipe-larger").is_visible()
    for language in ("en", "ko"):  # one reader
        page.goto(f"{site}/{language}/map.html")
        rows = page.locator(".naranhi-predictions [data-chapter]")
        assert rows.count() == len(answered)
        row = page.locator(".naranhi-predictions [data-chapter='06_gpipe']")
        assert row.locator("[data-output=asked]").inner_text() == str(len(asked("en")["06_gpipe"]))
        assert row.evaluate(MARKS)["guessed"] == "2" and row.evaluate(MARKS)["close"] == "1"
    page.click("button[data-clear]")
    assert row.evaluate(MARKS)["guessed"] == "0"
    assert page.evaluate(KEPT) is None
    assert question(page, site).get_attribute("data-state") == "asking"


def test_guesses_of_two_tabs_are_all_kept(page, site):
    first = question(page, site)
    tab = page.context.new_page()
    second = question(tab, site, "gpipe-recomputed")
    for root, guess in ((second, "399"), (first, "−\uff11\uff12.5"), (first, "12.5")):
        root.locator("input[name=guess]").fill(guess)
        root.locator("button[data-show]").click()
        if guess[0] == "−":  # it is a number, in wide digits with a minus, and out of range
            assert "between 0 and 100" in root.locator("[role=status]").inner_text()
    kept = page.evaluate(KEPT)
    assert {"gpipe-larger", "gpipe-recomputed"} <= {*json.loads(kept)["06_gpipe"]}
    # And who deletes all does so for all tabs.
    overview = page.context.new_page()
    overview.goto(f"{site}/en/map.html")
    overview.click("button[data-clear]")
    root = tab.locator(".naranhi-predict[data-predict=gpipe-padding]")
    root.locator("button[data-skip]").click()
    assert [*json.loads(page.evaluate(KEPT))["06_gpipe"]] == ["gpipe-padding"]


def test_a_damaged_guess_is_none_and_only_what_is_asked_counts(page, site):
    page.goto(f"{site}/404.html")
    kept = {
        "06_gpipe": {
            "gpipe-larger": None,
            "gpipe-recomputed": {},
            "gpipe-padding": {"guess": 4, "off": 0},
            "gpipe-before-an-edition": {"guess": 4, "off": 0},
        },
        "07_activation_memory": None,
    }
    keep = "(kept) => localStorage.setItem('naranhi-predict', JSON.stringify(kept))"
    page.evaluate(keep, kept)
    for name, state in (("larger", "asking"), ("recomputed", "asking"), ("padding", "shown")):
        assert question(page, site, f"gpipe-{name}").get_attribute("data-state") == state
    page.goto(f"{site}/en/map.html")
    row = page.locator(".naranhi-predictions [data-chapter='06_gpipe']")
    assert row.evaluate(MARKS) == {"asked": None, "guessed": "1", "close": "1"}
    page.click("button[data-clear]")
    assert page.evaluate(KEPT) is None
    page.evaluate(keep, 5)
    question(page, site).locator("button[data-skip]").click()
    assert json.loads(page.evaluate(KEPT)) == {"06_gpipe": {"gpipe-larger": {"guess": None}}}


def test_the_slider_says_what_it_means(page, site):
    slider = question(page, site).locator("input[type=range]")
    assert slider.get_attribute("aria-valuetext") == "0%"
    slider.fill("0.25")
    assert slider.get_attribute("aria-valuetext") == "25%"


def test_the_fields_are_described_by_the_question(page, site):
    for name, chapter, field in (
        ("gpipe-larger", "06_gpipe", "input[name=guess]"),
        ("pipedream-right", "09_pipedream", "fieldset"),
    ):
        root = question(page, site, name, chapter=chapter)
        described = root.locator(field).get_attribute("aria-describedby")
        assert page.locator(f"#{described}").inner_text().rstrip().endswith("?")


BAD = {
    ("en", "about half"): "“about half” is not a number",
    ("en", "101"): "The answer lies between 0 and 100",
    ("en", ""): "First a guess",
    ("ko", "절반쯤"): "‘절반쯤’: 숫자가 아닙니다",
    ("ko", "-1"): "답은 0 이상 100% 이하입니다",
    ("ko", "1e"): "숫자가 아닙니다",
}


@pytest.mark.parametrize(("language", "text"), BAD)
def test_a_guess_that_cannot_be_one_is_refused_in_words(page, site, language, text):
    root = question(page, site, language=language)
    root.locator("input[name=guess]").fill(text)
    root.locator("button[data-show]").click()
    assert BAD[language, text] in root.locator("[role=status]").inner_text()
    assert root.get_attribute("data-state") == "asking"
    assert not covered(page, "gpipe-larger").is_visible()
    assert page.evaluate(KEPT) is None
    field = root.locator("input[name=guess]")
    assert field.get_attribute("aria-invalid") == "true"
    assert field.evaluate("(field) => field === document.activeElement")


def test_the_keyboard_is_enough(page, site):
    root = question(page, site)
    root.locator("input[name=guess]").focus()
    page.keyboard.type("40")
    assert root.locator("input[type=range]").input_value() == "0.4"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert float(root.locator("input[name=guess]").input_value()) == 41
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert root.get_attribute("data-state") == "shown"
    assert root.locator("[role=status]").evaluate("(said) => said === document.activeElement")
    root = question(page, site, "pipedream-right", chapter="09_pipedream")
    root.locator("input[type=radio]").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert root.evaluate(MARKS) == {"guess": "1", "measured": "3"}


def test_the_rank_that_is_right_can_be_named(page, site):
    root = question(page, site, "pipedream-right", "ko", "09_pipedream")
    root.locator("button[data-show]").click()
    assert "먼저 예상을 적어 보세요" in root.locator("[role=status]").inner_text()
    root.get_by_label("랭크 3").check()
    root.locator("button[data-show]").click()
    assert "맞았습니다" in root.locator("[role=status] p").inner_text()
    # The cells between answer the next question as well.
    assert not covered(page, "pipedream-right").is_visible()
    page.locator("[data-predict=pipedream-off] button[data-skip]").click()
    assert covered(page, "pipedream-right").is_visible()


@pytest.mark.parametrize("language", ["en", "ko"])
def test_without_storage_it_works_and_says_so(page, site, language):
    page.add_init_script(DEAF)
    root = question(page, site, language=language)
    root.locator("input[name=guess]").fill("1,0")
    assert root.get_attribute("data-state") == "asking"
    root.locator("input[name=guess]").fill("10")
    root.locator("button[data-show]").click()
    assert root.evaluate(MARKS)["guess"] == "10"
    lost = {"en": "This browser stores nothing", "ko": "이 브라우저에는 저장할 수 없어서"}[language]
    assert lost in root.locator("[role=status] p").inner_text()
    page.goto(f"{site}/{language}/map.html")
    page.click("button[data-clear]")


def test_without_scripts_and_on_paper_everything_is_there(site, chromium, page):
    context = chromium.new_context(java_script_enabled=False)
    plain = context.new_page()
    root = question(plain, site)
    assert root.locator("p", has_text="bubble of four micro-batches").is_visible()
    assert covered(plain, "gpipe-larger").is_visible()
    assert not root.locator("form").is_visible()
    plain.goto(f"{site}/en/map.html")
    assert not plain.locator(".naranhi-predictions").is_visible()
    context.close()
    root = question(page, site)
    page.emulate_media(media="print")
    assert covered(page, "gpipe-larger").is_visible()
    assert root.locator("p", has_text="bubble of four micro-batches").is_visible()
    assert not root.locator("form").is_visible()


def test_a_link_into_what_is_covered_uncovers_it(page, site):
    page.goto(f"{site}/en/06_gpipe.html#table-06-size-or-number")
    page.wait_for_function("() => scrollY > 1000")
    root = page.locator(".naranhi-predict[data-predict=gpipe-larger]")
    assert root.get_attribute("data-state") == "shown"
    assert page.locator("#table-06-size-or-number").is_visible()
    assert page.evaluate(KEPT) is None  # the reader has not skipped it


def test_nothing_is_sent(page, site):
    root = question(page, site)
    page.wait_for_load_state("networkidle")
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    root.locator("input[name=guess]").fill("40")
    root.locator("button[data-show]").click()
    page.wait_for_timeout(500)
    assert sent == []


@pytest.mark.parametrize("language", ["en", "ko"])
def test_axe_and_a_phone_find_nothing_wrong(site, chromium, language):
    context = chromium.new_context(viewport=PHONE, color_scheme="dark")
    page = context.new_page()
    found = []
    for chapter in ("06_gpipe", "09_pipedream"):
        page.goto(f"{site}/{language}/{chapter}.html", wait_until="networkidle")
        for state in ("asking", "wrong", "shown"):
            for root in page.locator(".naranhi-predict").all():
                if state == "wrong":
                    root.locator("button[data-show]").click()
                if state == "shown":
                    root.locator("input[name=guess]").first.evaluate(
                        "(one) => { one.type === 'radio' ? one.checked = true : one.value = '4' }"
                    )
                    root.locator("button[data-show]").click()
            found += [
                (chapter, state, one["id"])
                for one in violations(page, {"include": [[".naranhi-predict"]]})
                if one["impact"] in ("serious", "critical")
            ]
            assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
    page.goto(f"{site}/{language}/map.html", wait_until="networkidle")
    wrong = violations(page, {"include": [[".naranhi-predictions"]]})
    found += [one["id"] for one in wrong if one["impact"] != "minor"]
    assert found == []
    context.close()


def test_every_question_of_the_book_can_be_answered(page, site, asked, answered):
    """In one language a chapter; both have the same scripts and answers."""
    for n, (chapter, names) in enumerate(answered.items()):
        language = ("en", "ko")[n % 2]
        page.goto(f"{site}/{language}/{chapter}.html")
        for name, answer in names.items():
            root = page.locator(f".naranhi-predict[data-predict={name}]")
            field = root.locator("input[name=guess]")
            if "choices" in asked("en")[chapter][name]:
                field.last.check()
            else:
                field.fill(truth(answer))
            root.locator("button[data-show]").click()
            marks = root.evaluate(MARKS)
            assert {key: marks[key] for key in answer} == answer, name
        assert page.locator(".naranhi-covered").count() == 0, chapter
