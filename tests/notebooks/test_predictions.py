"""What a chapter asks its reader to predict: each question has its answer in a cell after it."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import naranhi_predict  # noqa: E402

CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks/en").glob("*.ipynb"))
COMMENTS = re.compile(r"^:class: predict\n((?:% .*\n)+)", re.MULTILINE)
ANSWER = re.compile(r'\bshow\.answer\(\s*"([^"]*)"')


def cells(language: str, chapter: str) -> list:
    return nbformat.read(ROOT / "notebooks" / language / f"{chapter}.ipynb", as_version=4).cells


def questions(cell) -> list[dict]:
    found = COMMENTS.findall(cell.source) if cell.cell_type == "markdown" else []
    return [naranhi_predict.asked(re.sub("^% ", "", text, flags=re.M)) for text in found]


def events(language: str, chapter: str) -> list[tuple[int, str, str]]:
    """Questions and answers in order: after how many code cells, which kind, and the name."""
    found, count = [], 0
    for cell in cells(language, chapter):
        found += [(count, "question", one["name"]) for one in questions(cell)]
        if cell.cell_type == "code":
            count += 1
            found += [(count, "answer", name) for name in ANSWER.findall(cell.source)]
    return found


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_question_has_one_answer_a_few_cells_later(chapter):
    found = events("en", chapter)
    asked = {name: at for at, kind, name in found if kind == "question"}
    answered = {name: at for at, kind, name in found if kind == "answer"}
    assert len(found) == 2 * len(asked) and asked.keys() == answered.keys()
    assert len(asked) >= 2
    # Between the two all outputs are covered.
    assert all(1 <= answered[name] - asked[name] <= 5 for name in asked)


def test_a_name_is_a_questions_alone():
    names = [
        name
        for chapter in CHAPTERS
        for _, kind, name in events("en", chapter)
        if kind == "question"
    ]
    assert len(names) == len({*names}) >= 50


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_both_languages_ask_the_same(chapter):
    english, korean = (
        [one for cell in cells(language, chapter) for one in questions(cell)]
        for language in ("en", "ko")
    )
    for ours, theirs in zip(english, korean, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ("name", "range", "scale"):
            assert ours.get(key) == theirs.get(key)
        assert len(ours.get("choices", [])) == len(theirs.get("choices", []))


@pytest.mark.parametrize(
    ("comments", "words"),
    [
        ("name: a\nrange: 0 1\nhint: no", "unknown key in a prediction: hint"),
        ("range: 0 1", "a prediction needs a name such as a-name, and either a range or"),
        ("name: A name\nrange: 0 1", "a prediction needs a name such as a-name, and either a"),
        ("name: a", "a prediction needs a name such as a-name, and either a range or choices"),
        ("name: a\nrange: 0 1\nchoices: x | y", "and either a range or choices"),
        ("name: a\nrange: 1 0", "range 1 0 must rise"),
        ("name: a\nrange: 100", "a range is two numbers, such as 0 100, not '100'"),
        ("name: a\nrange: 0% 100%", "a range is two numbers, such as 0 100, not '0% 100%'"),
        ("name: a\nrange: 0 inf", "a range is two numbers, such as 0 100, not '0 inf'"),
        ("name: a\nrange: 0 1\nscale: log", "range 0 1 must rise, and start above 0 with a scale"),
        ("name: a\nrange: 1 2\nscale: square", "a scale is log, or not given; not 'square'"),
        ("name: a\nchoices: x |", "two choices or more are separated by |"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(comments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        naranhi_predict.asked(comments)
