"""The live pages in Chromium: the book's own code, unchanged, answers as it does natively."""

import json
import math
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import lab as answers
import pytest
import yaml
from accessibility import violations
from lab_settings import drawn_settings, simulated
from playwright.sync_api import TimeoutError

from naranhi import measure, schedules
from naranhi.show import COLORS
from naranhi.show._colors import KINDS

REPOSITORY = Path(__file__).resolve().parents[2]
WORDS = {
    code: yaml.safe_load((REPOSITORY / f"book/{code}/lab.yml").read_text()) for code in ("en", "ko")
}
KINDS_OF_LABS = ("schedule", "puzzle", "collectives", "activations", "zero", "planning")
PHONE = {"width": 390, "height": 780}
WAIT = 120_000  # milliseconds: the machine may be busy

pytestmark = pytest.mark.timeout(900)

PLAIN = {
    "schedule": "gpipe",
    "compare": "",
    "stages": "2",
    "microbatches": "2",
    "forward": "1",
    "backward": "2",
    "latency": "0",
    "bandwidth": "",
}

# Sets fields as a reader does, and waits for the answer.
CHANGE = """async ([kind, values]) => {
  const root = document.querySelector(`.naranhi-lab[data-lab="${kind}"]`);
  for (const [name, value] of Object.entries(values)) {
    const input = root.querySelector(`[name="${name}"]`);
    input.value = value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  }
  while (root.dataset.state === "loading") await new Promise((next) => setTimeout(next, 5));
  return {
    state: root.dataset.state,
    message: root.querySelector(".naranhi-lab-message").textContent.trim(),
    outputs: Object.fromEntries([...root.querySelectorAll("[data-output]")]
      .map((one) => [one.dataset.output, one.dataset.value])),
    boxes: [...root.querySelectorAll("figure:not([hidden]) rect")].map((box) => ({
      ...box.dataset, x: box.x.baseVal.value, width: box.width.baseVal.value,
      y: box.y.baseVal.value, fill: box.getAttribute("fill"),
    })),
  };
}"""


class Lab:
    """A page, with what it has asked for."""

    def __init__(self, chromium, site, path, **context):
        self.context = chromium.new_context(**context)
        self.page = self.context.new_page()
        self.requests, self.unanswered, self.failures = [], [], []
        self.page.on("request", self.asked)
        for ended in ("requestfinished", "requestfailed"):
            self.page.on(ended, lambda one: self.unanswered.remove(one))
        self.page.on("pageerror", lambda error: self.failures.append(str(error)))
        self.address = f"{site}/{path}"

    def asked(self, request):
        self.requests.append(f"{request.method} {request.url}")
        self.unanswered.append(request)

    def go(self):
        self.page.goto(self.address, wait_until="networkidle")
        return self

    def root(self, kind="schedule"):
        return self.page.locator(f".naranhi-lab[data-lab={kind}]").first

    def run(self, kind="schedule", state="ready"):
        root = self.root(kind)
        root.locator("button[data-run]").click()
        try:
            self.page.wait_for_selector(
                f".naranhi-lab[data-lab={kind}]:is([data-state=ready], [data-state=error])",
                timeout=WAIT,
            )
        except TimeoutError as error:
            unanswered = [f"{one.method} {one.url}" for one in self.unanswered]
            error.add_note(f"unanswered: {unanswered}; failures: {self.failures}")
            raise
        assert root.get_attribute("data-state") == state, root.inner_text()
        return self

    def change(self, kind="schedule", **values):
        return self.page.evaluate(CHANGE, [kind, values])


@pytest.fixture
def visit(chromium, site):
    """Pages that are closed when the test is over: an open one goes on drawing what moves."""
    opened = []

    def open_page(path="en/lab.html", **context):
        opened.append(Lab(chromium, site, path, **context))
        return opened[-1]

    yield open_page
    for lab in opened:
        lab.context.close()


@pytest.fixture(scope="module", params=WORDS)
def live(request, chromium, site):
    """The page of labs in a language, with all of them running."""
    lab = Lab(chromium, site, f"{request.param}/lab.html").go()
    lab.language, lab.before = request.param, len(lab.requests)
    for kind in KINDS_OF_LABS:
        lab.run(kind)
    assert lab.failures == []
    yield lab
    lab.context.close()


@pytest.fixture(scope="module")
def english(chromium, site):
    """The schedule lab of a chapter."""
    lab = Lab(chromium, site, "en/06_gpipe.html").go().run()
    yield lab
    lab.context.close()


def test_nothing_is_fetched_before_a_click_and_nothing_from_elsewhere(live, site):
    before, after = live.requests[: live.before], live.requests[live.before :]
    of_labs = [url for url in before if "/lab/" in url or "pyodide" in url]
    assert [Path(urlsplit(url).path).name for url in of_labs] == ["start.js", "served.js"]
    loaded = [one for one in after if one.startswith("GET") and "pyodide.asm.wasm" in one]
    assert len(loaded) == 1, "one runtime for all labs"
    addresses = [one.partition(" ")[2] for one in live.requests]
    hosts = {urlsplit(url).netloc for url in addresses if not url.startswith("data:")}
    assert hosts == {urlsplit(site).netloc}


def test_a_page_that_was_opened_as_a_file_says_what_to_do(chromium, built, site):
    """There a browser loads no module: the button stayed hidden, without a word."""
    page = chromium.new_page()
    page.goto((built / "ko/06_gpipe.html").as_uri())
    note = page.locator(".naranhi-lab .naranhi-lab-failed")
    assert note.count() == 1 and "python3 -m http.server" in note.inner_text()
    assert page.locator("button[data-run]").is_hidden()
    page.goto(f"{site}/ko/06_gpipe.html")
    page.wait_for_selector("button[data-run]")
    assert note.count() == 0
    page.close()


def test_without_scripts_a_lab_says_so(chromium, site):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}/en/06_gpipe.html")
    assert "needs JavaScript" in page.locator(".naranhi-lab noscript").inner_text()
    context.close()


def test_a_page_weighs_no_more_before_a_click(built):
    """Beside the picture: a script, some lines of the style sheet, the frame."""
    page = (built / "en/06_gpipe.html").read_text()
    [lab] = re.findall(r'<div id="lab-schedule".*?<div class="naranhi-lab-picture">', page, re.S)
    style = (built / "en/_static/naranhi.css").read_text()
    [rules] = re.findall(r"/\* ---- labs.*?(?=/\* ---- search)", style, re.S)
    scripts = [(built / f"en/_static/lab/{name}.js").read_text() for name in ("start", "served")]
    assert len(lab) + len(rules) + sum(map(len, scripts)) < 5800


def test_a_hundred_settings_are_answered_as_natively(english):
    for values in drawn_settings(100):
        schedule, line = simulated(values)
        shown = english.change(**values, compare="")
        assert (shown["state"], shown["message"]) == ("ready", ""), values
        numbers = {name: json.loads(value) for name, value in shown["outputs"].items()}
        assert numbers == {
            "bubble_rate": line.bubble_rate,
            "cost": line.cost,
            "peak_activations": list(line.peak_activations),
            "messages": sum(map(len, schedules.channels(schedule).values())),
        }, values
        expected = [
            (str(rank), str(action), start, end)
            for rank, row in enumerate(line)
            for action, start, end in row
        ]
        assert expected == [
            (box["rank"], box["action"], float(box["start"]), float(box["end"]))
            for box in shown["boxes"]
        ], values
        assert_drawn_to_scale(shown["boxes"])


def assert_drawn_to_scale(boxes):
    """One line maps times to places; the colours are those of `show.timeline`."""
    first = min(boxes, key=lambda box: float(box["start"]))
    last = max(boxes, key=lambda box: float(box["start"]))
    begun, end = float(first["start"]), float(last["start"])
    scale = (last["x"] - first["x"]) / (end - begun) if end > begun else 0
    for box in boxes:
        place = first["x"] + (float(box["start"]) - begun) * scale
        assert math.isclose(box["x"], place, abs_tol=0.01)
        wide = (float(box["end"]) - float(box["start"])) * scale
        assert not scale or wide - 1.01 <= box["width"] <= wide + 0.01
        assert box["fill"] == KINDS[re.sub(r"[0-9@]", "", box["action"])][1]
    assert len(COLORS) == 4


@pytest.mark.parametrize(
    "own",
    [
        "0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1",
        "0F0 0B0\n1B0 1F0",
        "0F0,0X0\n1F0,1B0",
        "0F0,0F1,0B0\n1F0,1F1,1B0,1B1",
    ],
)
def test_a_schedule_of_ones_own_hears_the_books_errors(english, own):
    with pytest.raises(schedules.ScheduleError) as refused:
        schedules.check(schedules.read_csv(own.replace(" ", ",").splitlines()))
    english.change(**PLAIN)
    shown = english.change(schedule="own", own=own)
    assert shown["state"] == "error" and len(shown["boxes"]) == 8, "what was drawn stays"
    texts = WORDS["en"]["texts"]
    assert shown["message"] == f"{texts['package']} {refused.value}{texts['before']}"
    assert english.change(own="0F0 0B0\n1F0 1B0")["outputs"]["cost"] == "6"


def test_who_begins_to_write_has_the_schedule_that_is_drawn(english):
    english.change(own="")
    english.change(schedule="zero_bubble_h1", stages="2", microbatches="3")
    english.change(schedule="own")
    typed = english.root().locator("[name=own]").input_value()
    assert schedules.read_csv(typed.splitlines()) == schedules.zero_bubble_h1(2, 3)
    link = english.root().locator("a.naranhi-lab-link").get_attribute("href")
    assert parse_qs(link)["own"] == [typed]


def test_two_schedules_share_an_axis(english):
    shown = english.change(schedule="gpipe", compare="one_f_one_b", stages="4", microbatches="8")
    assert shown["outputs"]["peak_activations"] == "[8,8,8,8]"
    assert shown["outputs"]["compared_peak_activations"] == "[4,3,2,1]"
    assert len(shown["boxes"]) == 2 * 64
    english.change(compare="")


# The chapter's lab begins with GPipe and 4 micro-batches, where a lab usually has 1F1B and 8.
@pytest.mark.parametrize(
    "values",
    [
        {"schedule": "interleaved", "stages": "3", "microbatches": "6", "latency": "0.5"},
        {"schedule": "one_f_one_b", "stages": "4", "microbatches": "8", "latency": "0"},
    ],
)
def test_a_link_carries_the_settings(english, visit, values):
    drawn = english.change(**values, compare="")["boxes"]
    link = english.root().locator("a.naranhi-lab-link").get_attribute("href")
    again = visit("en/06_gpipe.html")
    again.address += link
    again.go().run()
    assert again.change(compare="")["boxes"] == drawn
    assert again.root().locator("[name=latency]").input_value() == values["latency"]


def test_a_link_that_is_followed_on_the_page_carries_all_settings(visit):
    """Also those that are as at the beginning, and have been changed meanwhile."""
    lab = visit("en/06_gpipe.html").go().run()
    lab.change(stages="3", latency="2")
    lab.page.evaluate("location.hash = 'lab-schedule&stages=2'")
    root = lab.root()
    latency, stages = (root.locator(f"[name={name}]") for name in ("latency", "stages"))
    wait = "([input, value]) => input.value === value"
    lab.page.wait_for_function(wait, arg=[stages.element_handle(), "2"])
    assert latency.input_value() == "0"
    # What is no field, but a word of JavaScript, is none.
    lab.page.evaluate("location.hash = 'lab-schedule&constructor=1&__proto__=x&stages=3'")
    lab.page.wait_for_function(wait, arg=[stages.element_handle(), "3"])
    assert lab.failures == []
    # What is not shown counts for nothing, and may be a reader's work; back is the beginning.
    own = root.locator("[name=own]")
    lab.change(own="0F0 0B0", chunks="4", schedule="gpipe", compare="")
    lab.page.evaluate("location.hash = 'lab-schedule&schedule=interleaved&stages=5'")
    lab.page.wait_for_function(wait, arg=[stages.element_handle(), "5"])
    assert own.input_value() == "0F0 0B0"
    assert root.locator("[name=chunks]").input_value() == "2"
    for value in ("3", "2", "4"):
        lab.page.go_back()
        lab.page.wait_for_function(wait, arg=[stages.element_handle(), value])
    assert own.input_value() == "0F0 0B0"
    # But a link to a section changes no lab.
    lab.change(stages="6")
    lab.page.evaluate("location.hash = 'bubble'")
    lab.page.go_back()
    lab.page.wait_for_function("() => location.hash === ''")
    lab.page.wait_for_timeout(100)
    assert stages.input_value() == "6"


def test_stepping_scrubbing_and_playing(english):
    english.change(**PLAIN)
    root, words = english.root(), WORDS["en"]["texts"]
    later = root.locator("rect.later")
    assert later.count() == 0
    root.get_by_role("button", name=words["back"]).click()
    said = root.locator(".naranhi-lab-player output")
    assert said.inner_text() == "At 7: rank 0 runs 0B0, rank 1 runs 1B1."
    scrub = root.get_by_label(words["scrub"])
    scrub.fill("1")  # at time 1, when only the first forward has run
    assert later.count() == 7
    root.get_by_role("button", name=words["forward"]).click()
    assert later.count() == 5
    root.get_by_role("button", name=words["replay"]).click()
    pause = root.get_by_role("button", name=words["pause"])
    pause.click()
    assert 0 < later.count() <= 8
    scrub.fill(scrub.get_attribute("max"))
    assert later.count() == 0


def test_one_micro_batch_can_be_followed(english):
    english.change(**PLAIN | {"microbatches": "3"})
    root = english.root()
    root.locator("rect[data-action='1F2']").hover()
    assert {
        box.get_attribute("data-microbatch")
        for box in root.locator("rect[data-action]:not(.other)").all()
    } == {"2"}
    picture = root.locator("svg.naranhi-lab-timeline").first
    picture.focus()
    english.page.mouse.move(0, 0)
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        picture.press(key)
    said = root.locator("figure output").first.inner_text()
    assert said == "Rank 1, 1F0: forward of micro-batch 0, from 1 to 2."
    picture.press("Escape")
    assert root.locator("rect.other").count() == 0


def test_the_same_numbers_are_in_a_table(english):
    english.change(**PLAIN)
    fold = english.root().locator("details", has_text=WORDS["en"]["texts"]["table"]).first
    fold.locator("summary").click()
    rows = [
        row.all_inner_texts() for row in (r.locator("td") for r in fold.locator("tbody tr").all())
    ]
    assert len(rows) == 8 and rows[0] == ["0", "0F0", "0", "1"]
    fold.locator("summary").click()


def test_a_trace_stands_beside_its_simulation(english, tmp_path):
    line = schedules.simulate(schedules.one_f_one_b(2, 4), 0.01, 0.02)
    measure.write_trace(line, tmp_path / "trace.json")
    root = english.root()
    root.locator("input[type=file]").set_input_files(tmp_path / "trace.json")
    root.locator("[data-output=file_cost]").wait_for()
    value = float(root.locator("[data-output=file_cost]").get_attribute("data-value"))
    assert value == pytest.approx(line.cost)
    assert root.locator(".naranhi-lab-dropped rect").count() == 2 * 16
    assert root.locator(".naranhi-lab-dropped details[open] tbody tr").count() == 16
    schedules.write_csv(schedules.gpipe(2, 4), tmp_path / "own.csv")
    root.locator("input[type=file]").set_input_files(tmp_path / "own.csv")
    root.locator(".naranhi-lab-dropped", has_text="own.csv").wait_for()


def test_a_file_and_the_fields_are_both_answered(english, tmp_path):
    """Asked at once: the last of what the fields say, and the file, beside these."""
    english.change(**PLAIN)
    shown = english.page.evaluate(
        """async () => {
          const root = document.querySelector(".naranhi-lab[data-lab=schedule]");
          const set = (name, value) => {
            const input = root.querySelector(`[name="${name}"]`);
            input.value = value;
            input.dispatchEvent(new Event("input", { bubbles: true }));
          };
          const text = () => Promise.resolve("0F0,0F1,0B0,0B1\\n1F0,1F1,1B0,1B1");
          const dataTransfer = { files: [{ name: "own.csv", size: 40, text }] };
          set("microbatches", "64");
          set("microbatches", "12");
          const drop = root.querySelector(".naranhi-lab-drop");
          drop.dispatchEvent(Object.assign(new Event("drop"), { dataTransfer }));
          await new Promise((next) => setTimeout(next, 0));
          while (root.dataset.state === "loading") await new Promise((next) => setTimeout(next, 5));
          const value = (name) => root.querySelector(`[data-output=${name}]`)?.dataset.value;
          return [root.dataset.state, value("messages"), value("file_cost")];
        }"""
    )
    cost = [schedules.simulate(schedules.gpipe(2, 2), forward, 2).cost for forward in (1, 5)]
    assert shown[:2] == ["ready", "24"] and float(shown[2]) == cost[0]
    # The times of the fields are the file's: it is asked again when they change.
    assert float(english.change(forward="5")["outputs"]["file_cost"]) == cost[1]
    english.root().locator("input[type=file]").set_input_files([])


def test_a_field_that_is_not_shown_does_not_count(english):
    english.change(**PLAIN)
    assert english.change(schedule="interleaved", chunks="some")["state"] == "error"
    shown = english.change(schedule="gpipe")
    assert shown["state"] == "ready" and shown["message"] == ""
    assert "chunks" not in english.root().locator(".naranhi-lab-link").get_attribute("href")
    assert english.change(schedule="interleaved", chunks="2")["state"] == "ready"
    english.change(**PLAIN)


def test_a_number_may_be_written_as_the_results_are(english):
    english.change(**PLAIN)
    assert english.change(bandwidth="1,024")["state"] == "ready"
    assert "bandwidth=1024" in english.root().locator(".naranhi-lab-link").get_attribute("href")
    assert english.change(bandwidth="1,5")["state"] == "error"
    assert english.change(bandwidth="", forward="1,200")["state"] == "ready"  # for two stages
    assert "forward=1%2C200" in english.root().locator(".naranhi-lab-link").get_attribute("href")
    english.change(**PLAIN)


def test_python_that_broke_down_is_started_anew(visit):
    """A file of too many brackets fills its stack, after which Pyodide answers nothing more."""
    lab = visit().go().run("planning").run("zero")
    lab.change("planning", model="config.json")
    shown = lab.change("planning", config="[" * 100_000)
    assert shown["state"] == "error"
    assert WORDS["en"]["errors"]["internal"].partition("{")[0] in shown["message"]
    assert lab.change("planning", model="config.json", config="{}")["state"] == "error"
    assert lab.change("zero", ranks="4")["state"] == "ready"


def test_who_has_gone_on_meanwhile_stays_there(visit):
    lab = visit("en/06_gpipe.html").go()
    lab.page.evaluate(
        """() => {
          document.querySelector(".naranhi-lab button[data-run]").click();
          document.querySelector(".naranhi-twin").focus();
        }"""
    )
    lab.page.wait_for_selector(".naranhi-lab[data-state=ready]", timeout=WAIT)
    assert lab.page.evaluate("document.activeElement.className").endswith("naranhi-twin")
    again = visit("en/06_gpipe.html").go().run()
    assert again.page.evaluate("document.activeElement.name") == "schedule"


# --- both languages ------------------------------------------------------------------------------


def test_calculators_answer_as_the_package_does(live):
    for kind, values in {
        "collectives": {"ranks": "6", "bytes": "1e7"},
        "activations": {"heads": "16", "recompute": "selective"},
        "zero": {"stage": "2", "parameters": "1.3e9"},
        "planning": {"gpus": "16", "global_batch": "64"},
    }.items():
        native = json.loads(answers.answer(json.dumps({"lab": kind, "values": values})))["outputs"]
        shown = live.change(kind, **values)["outputs"]
        assert shown.keys() == native.keys()
        for name, output in native.items():
            value = output["value"]
            same = shown[name] if isinstance(value, str) else json.loads(shown[name])
            # The planner sums, and from Python 3.12 on `sum` rounds otherwise.
            planned = kind == "planning" and isinstance(value, float)
            assert same == (pytest.approx(value, rel=1e-12) if planned else value)


def test_a_puzzle_is_judged_in_the_page(live):
    shown = live.change("puzzle", own=str(schedules.zero_bubble_h1(4, 8)))
    assert shown["outputs"]["passes"] == "false"
    assert "takes 27, where 26 is the budget" in live.root("puzzle").inner_text()
    shown = live.change("puzzle", own=str(schedules.zero_bubble_h1(4, 8)), cost="27")
    assert shown["outputs"]["passes"] == "true"


BAD = {
    "stages": ("99", "out_of_range"),
    "microbatches": ("many", "no_number"),
    "latency": ("-1", "out_of_range"),
    "forward": ("1 2", None),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_has_a_message_in_the_readers_language(live, name):
    text, code = BAD[name]
    live.change(schedule="gpipe", stages="4", microbatches="8", latency="0", forward="1")
    shown = live.change(**{name: text})
    words = WORDS[live.language]
    begin = words["texts"]["package"] if code is None else words["errors"][code]
    fixed = max(re.split(r"\{\w+\}", begin), key=len)
    assert shown["state"] == "error" and fixed.strip() in shown["message"]
    assert len(shown["boxes"]) == 64, "the picture stays"
    assert words["texts"]["before"] in shown["message"]
    invalid = "[aria-invalid=true]"
    marked = live.root().locator(invalid).evaluate_all("(all) => all.map((one) => one.name)")
    assert marked == ([] if code is None else [name])
    before = len(live.requests)
    assert live.change(**{name: "4" if name == "stages" else "1"})["state"] == "ready"
    assert live.requests[before:] == [], "nothing is sent anywhere"
    assert live.root().locator(invalid).count() == 0
    assert live.root().locator("[role=status]").inner_text() == words["texts"]["updated"]


def test_ten_thousand_actions_are_too_many(live):
    live.change(schedule="gpipe", stages="10")
    shown = live.change(microbatches="500")
    begin = WORDS[live.language]["errors"]["too_many_actions"].partition("{")[0]
    assert shown["state"] == "error" and shown["message"].startswith(begin)
    assert "10,000" in shown["message"]
    live.change(microbatches="8", stages="4")


def test_a_file_that_is_no_trace(live, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    root = live.root()
    root.locator("input[type=file]").set_input_files(tmp_path / "picture.png")
    live.page.wait_for_selector(".naranhi-lab[data-lab=schedule][data-state=error]")
    end = WORDS[live.language]["errors"]["no_trace"].split("}")[1].split("{")[0].strip()
    assert end in root.locator(".naranhi-lab-message").inner_text()
    assert live.change(stages="4")["state"] == "ready"


def test_a_folder_is_no_trace(live):
    """Chromium lets a reader drop one, and fails to read it."""
    live.change(stages="4")
    live.root().locator(".naranhi-lab-drop").evaluate(
        """place => {
          const text = () => Promise.reject(new Error("it cannot be read"));
          const files = [{ name: "runs", size: 4096, text }];
          place.dispatchEvent(Object.assign(new Event("drop"), { dataTransfer: { files } }));
        }"""
    )
    live.page.wait_for_selector(".naranhi-lab[data-lab=schedule][data-state=error]")
    said = live.root().locator(".naranhi-lab-message").inner_text()
    assert "runs" in said and "it cannot be read" in said
    assert live.change(stages="4")["state"] == "ready"


def test_every_control_can_be_reached_and_has_a_name(live):
    found = live.page.evaluate(
        """() => [...document.querySelectorAll(
            ".naranhi-lab :is(button, input, select, textarea, summary, a, svg[tabindex])")]
          .filter((one) => one.checkVisibility()).map((one) => ({
            what: one.outerHTML.slice(0, 120), reached: one.tabIndex >= 0 && !one.disabled,
            name: (one.ariaLabel ?? one.labels?.[0]?.textContent ?? one.textContent).trim() }))"""
    )
    assert len(found) > 60
    assert [one["what"] for one in found if not (one["reached"] and one["name"])] == []


def test_axe_has_no_serious_finding(live):
    found = violations(live.page)
    serious = [
        (one["id"], [node["target"] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in ("serious", "critical")
        and any("naranhi-lab" in str(node["html"]) + str(node["target"]) for node in one["nodes"])
    ]
    assert serious == []


@pytest.mark.parametrize("language", WORDS)
def test_a_phone_shows_it_without_scrolling_sideways(visit, language):
    lab = visit(f"{language}/lab.html", viewport=PHONE).go()
    for kind in KINDS_OF_LABS:
        lab.run(kind)
    assert lab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


# Where the line stands at each action, and the first three places to which playing moves it.
PLAYED = """async ([root, play, scrubbed]) => {
  const line = root.querySelector("line.now");
  const scrub = root.querySelector(`input[aria-label="${scrubbed}"]`);
  const places = [];
  for (let place = Number(scrub.max); place >= 0; place--) {
    scrub.value = place;
    scrub.dispatchEvent(new Event("input"));
    places.push(line.getAttribute("x1"));
  }
  const played = [];
  await new Promise((enough) => {
    new MutationObserver((changes, observer) => {
      const x = line.getAttribute("x1");
      if (x !== played.at(-1)) played.push(x);
      if (played.length < 3) return;
      observer.disconnect();
      enough();
    }).observe(line, { attributeFilter: ["x1"] });
    [...root.querySelectorAll("button")].find((one) => one.textContent === play).click();
  });
  return [places, played];
}"""


def test_dark_pages_and_less_motion(visit):
    lab = visit("en/06_gpipe.html", color_scheme="dark", reduced_motion="reduce").go().run()
    ink = lab.page.evaluate("getComputedStyle(document.querySelector('.naranhi-lab text')).fill")
    assert min(map(int, re.findall(r"\d+", ink)[:3])) > 150, "letters are light"
    root, words = lab.root(), WORDS["en"]["texts"]
    places, played = lab.page.evaluate(
        PLAYED, [root.element_handle(), words["play"], words["scrub"]]
    )
    assert len(played) == 3 and set(played) <= set(places), "it goes from action to action"


def test_with_less_motion_it_plays_on_from_where_it_is(visit):
    lab = visit("en/06_gpipe.html", reduced_motion="reduce").go().run()
    lab.change(**PLAIN)
    root, words = lab.root(), WORDS["en"]["texts"]
    scrub = root.get_by_label(words["scrub"])
    scrub.fill("3")
    root.get_by_role("button", name=words["play"], exact=True).click()
    lab.page.wait_for_function("scrub => scrub.value === '4'", arg=scrub.element_handle())
    root.get_by_role("button", name=words["pause"]).click()
    place = int(scrub.input_value())
    line = schedules.simulate(schedules.gpipe(2, 2), 1, 2)
    moments = sorted({time for row in line for _, *times in row for time in times})
    assert place >= 4 and scrub.get_attribute("aria-valuetext") == f"{moments[place]:g}"


# --- without it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("language", WORDS)
def test_without_scripts_and_on_paper_the_picture_stands_there(visit, language):
    lab = visit(f"{language}/06_gpipe.html", java_script_enabled=False).go()
    lab.root().locator(".naranhi-lab-picture svg").wait_for()
    assert lab.root().get_attribute("data-state") == "static"
    assert not lab.root().locator("button[data-run]").is_visible()


def test_forced_colours_leave_the_legend_its_own(english):
    english.change(**PLAIN)
    english.page.emulate_media(forced_colors="active")
    colors = (
        english.root()
        .locator(".naranhi-lab-legend i")
        .evaluate_all("(all) => all.map((one) => getComputedStyle(one).backgroundColor)")
    )
    english.page.emulate_media(forced_colors="none")
    assert len(colors) == len({*colors}) >= 2, colors


def test_paper_shows_the_picture_of_the_build(english):
    english.page.emulate_media(media="print")
    root = english.root()
    assert root.locator(".naranhi-lab-picture svg").is_visible()
    assert not root.locator("form").is_visible() and not root.locator("figure").first.is_visible()
    english.page.emulate_media(media="screen")
    assert not root.locator(".naranhi-lab-picture svg").is_visible()


BROKEN = {
    "no WebAssembly": ("delete globalThis.WebAssembly", None, "no_wasm"),
    "no runtime": ("", "**/pyodide.asm.wasm", "runtime"),
    "no modules": ("", "**/naranhi-*.zip", "runtime"),
    "no catalogue": ("", "**/catalogue-*.json", "failed"),
    "no script": ("", "**/lab/main.js", "failed"),
}


@pytest.mark.parametrize("language", WORDS)
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_missing_is_said_and_the_page_stays(visit, language, what):
    script, route, code = BROKEN[what]
    lab = visit(f"{language}/06_gpipe.html")
    lab.page.add_init_script(script)
    if route:
        lab.context.route(route, lambda one: one.fulfill(status=404, body=""))
    lab.go().run(state="error")
    said = lab.root().locator(".naranhi-lab-failed").inner_text()
    fixed = max(re.split(r"\{\w+\}", WORDS[language]["errors"][code]), key=len)
    assert fixed.strip() in said
    assert lab.root().locator(".naranhi-lab-picture svg").is_visible()
    button = lab.root().locator("button[data-run]")
    assert button.is_enabled() and button.get_attribute("aria-disabled") is None, "try again"
    assert button.evaluate("(button) => button === document.activeElement")


# What fails for a moment, after a look at the files has found them there.
LOST = {
    "pyodide.asm.wasm": lambda one: one.fulfill(status=404),
    "python_stdlib.zip": lambda one: one.abort("internetdisconnected"),
    "pyodide.asm.mjs": lambda one: one.abort("connectionreset"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_second_try_works(visit, name):
    def answer(route):
        route.continue_() if route.request.method == "HEAD" else LOST[name](route)

    lab = visit("en/06_gpipe.html")
    lab.context.route(f"**/{name}", answer)
    lab.go().run(state="error")
    lab.context.unroute(f"**/{name}")
    lab.run()
    assert lab.root().locator(".naranhi-lab-failed").count() == 0


def test_storage_that_is_switched_off_changes_nothing(visit):
    lab = visit("en/06_gpipe.html")
    lab.page.add_init_script(
        """for (const name of ["localStorage", "sessionStorage", "indexedDB", "caches"])
          Object.defineProperty(globalThis, name, { get() { throw new Error("off"); } });"""
    )
    lab.go().run()
    assert lab.change(schedule="gpipe", stages="2", microbatches="2", compare="")["outputs"]["cost"]


def test_from_a_folder_the_picture_stands_there(chromium, built):
    page = chromium.new_page()
    page.goto((built / "en/06_gpipe.html").as_uri())
    assert page.locator(".naranhi-lab-picture svg").first.is_visible()
    assert not page.locator("button[data-run]").first.is_visible()
    page.close()
