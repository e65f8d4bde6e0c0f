"""Outputs in another language (`book/localize.py`): what is shown instead, and what is noted."""

import re
import sys
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_output

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "book"))

import localize  # noqa: E402
from alone import CannotBuild  # noqa: E402

ENTRIES = {
    "rank {}": "랭크 {}",
    "{} of {} ranks wait": "랭크 {1}개 중 {0}개가 기다린다",
    "(within {*})": "(오차 {*})",
    "(measured)": "(측정값)",
    "(measured: busy?)": "(측정값: 바쁜가?)",
    "it is false": "사실이 아니다",
    "{*}, expected {*}, off by {*} ({*} allowed)": "{0}, 예상 {1}, 차이 {2}({3}까지)",
    "late: rank {}": "늦게: 랭크 {}",
    "GPT-2 XL": None,
    "A ring of {} ranks.": "랭크 {}개의 링.",
    "Before:": "전:",
    "rank {} holds {*};": "랭크 {}: {*};",
    "rank {} holds {*}.": "랭크 {}: {*}.",
    "a & b": "가 & 나",
}


@pytest.fixture
def catalogue():
    return localize.Catalogue(ENTRIES)


def shown(catalogue, output):
    cell = new_code_cell("", outputs=[output])
    localize.outputs([cell], catalogue)
    return output


@pytest.mark.parametrize(
    ("text", "key", "numbers"),
    [
        ("3.2 ms on 4 ranks", "{} on {} ranks", ["3.2 ms", "4"]),
        (
            "1,024 B, 50 GB/s, 1e-06 and -3",
            "{}, {}, {} and {}",
            ["1,024 B", "50 GB/s", "1e-06", "-3"],
        ),
        ("2.5x of 75%", "{}x of {}%", ["2.5", "75"]),
        ("GPT-2, fp32, 1F1B and ZeRO-3", "GPT-2, fp32, 1F1B and ZeRO-3", []),
        ("5 steps, 12 Bs", "{} steps, {} Bs", ["5", "12"]),
    ],
)
def test_numbers_are_places_and_names_are_not(text, key, numbers):
    assert localize.template(text) == (key, numbers)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("✓ rank 3", "✓ 랭크 3"),
        ("✓ 2 of 4 ranks wait (measured)", "✓ 랭크 4개 중 2개가 기다린다 (측정값)"),
        ("[ranks 0-1] ✓ rank 3 (within 1%, measured)", "[ranks 0-1] ✓ 랭크 3 (오차 1%, 측정값)"),
        ("rank 3", "rank 3"),
        ("✗ rank 3: it is false (measured: busy?)", "✗ 랭크 3: 사실이 아니다 (측정값: 바쁜가?)"),
        ("[rank 1] ✗ a: rank 3: 5, expected 4 (measured: busy?)",) * 2,  # not a whole claim
        (
            "[rank 1] ✗ late: rank 3: 5, expected 0.4, off by 0.1 (5% allowed) (measured: busy?)",
            "[rank 1] ✗ 늦게: 랭크 3: 5, 예상 0.4, 차이 0.1(5%까지) (측정값: 바쁜가?)",
        ),
    ],
)
def test_claims_are_said_in_the_language_and_nothing_else_that_is_printed(catalogue, line, said):
    text = f"{line}\nloss 3.5\n"
    assert shown(catalogue, new_output("stream", text=text)).text == f"{said}\nloss 3.5\n"
    assert not catalogue.missing
    error = new_output("stream", name="stderr", text=text)
    assert shown(catalogue, error).text == text


def test_a_table_and_a_figure(catalogue):
    page = (
        '<table><caption>rank 1</caption><th style="x">a &amp; b</th><td>rank 2</td><td>f(x)</td>'
        '</table><svg aria-label="A ring of 2 ranks. Before: rank 0 holds &quot;A&quot;; rank 1 '
        'holds B."><text x="1">rank 0</text><text>17.5</text></svg><label>&nbsp;rank 9</label>'
        "<span>rank 3</span>"
    )
    output = new_output("display_data", data={"text/html": page, "text/plain": "rank 1"})
    assert shown(catalogue, output).data["text/html"] == (
        '<table><caption>랭크 1</caption><th style="x">가 &amp; 나</th><td>랭크 2</td><td>f(x)</td>'
        '</table><svg aria-label="랭크 2개의 링. 전: 랭크 0: &quot;A&quot;; 랭크 1: '
        'B."><text x="1">랭크 0</text><text>17.5</text></svg><label>\xa0랭크 9</label>'
        "<span>rank 3</span>"
    )
    assert not catalogue.missing


def test_what_has_no_entry_is_noted_unless_it_may_stay(catalogue):
    for text in ("two ranks", "GPT-2 XL", "17.5", "A0", "a hop of 3 ms"):
        assert catalogue.say(text) == text
    assert catalogue.say("a cell", required=False) == "a cell"
    assert catalogue.describe("A ring of 3 ranks. A tree. Before: nothing.") == (
        "랭크 3개의 링. A tree. Before: nothing."
    )
    assert catalogue.missing == {"two ranks", "a hop of {}", "A tree.", "Before: nothing."}


def test_a_chapter_has_the_common_entries_and_its_own_first(tmp_path):
    assert localize.load("ko", tmp_path, "a") is None
    folder = tmp_path / "book" / "ko" / "outputs"
    folder.mkdir(parents=True)
    (folder / "common.yml").write_text('"rank {}": 랭크 {}\n"stage {}": 스테이지 {}\n')
    (folder / "b.yml").write_text('"stage {}": "{}단계"\n')
    said = [localize.load("ko", tmp_path, name).say for name in "ab"]
    assert [say("rank 1") for say in said] == ["랭크 1", "랭크 1"]
    assert [say("stage 3") for say in said] == ["스테이지 3", "3단계"]


def written(tmp_path, text):
    path = tmp_path / "book" / "ko" / "outputs" / "a.yml"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return localize.load("ko", tmp_path, "a")


@pytest.mark.parametrize("said", ["랭크", "랭크 {}의 {}", "", "{1}단계", "{}단계 {0}"])
def test_a_translation_without_the_places_is_refused(tmp_path, said):
    with pytest.raises(CannotBuild, match=r"a.yml: 'step {}' and .* differ in the number of {}"):
        written(tmp_path, f'"step {{}}": "{said}"\n')


@pytest.mark.parametrize("said", ["{1} {2}", "{0} {0}", "{} {1}"])
def test_numbered_places_are_each_there_once(tmp_path, said):
    with pytest.raises(CannotBuild, match=r"begin with \{0\}, and each is there once"):
        written(tmp_path, f'"{{}} of {{}}": "{said}"\n')


def test_a_file_of_comments_has_no_entries(tmp_path):
    assert written(tmp_path, "# later\n").entries == {}


@pytest.mark.parametrize(
    "text, words",
    [
        ("yes: 예\n", r"a.yml: True: '예' is not text for YAML; write it in quotes"),
        ('"half": 0.5\n', r"a.yml: 'half': 0.5 is not text"),
        ('"rank: 1\n', "a.yml is not YAML: .*line 1"),
        ("- rank\n", 'a.yml: entries are written "TEXT": "TRANSLATION"'),
    ],
)
def test_a_file_that_has_no_texts_is_named(tmp_path, text, words):
    with pytest.raises(CannotBuild, match=re.compile(words, re.DOTALL)):
        written(tmp_path, text)
