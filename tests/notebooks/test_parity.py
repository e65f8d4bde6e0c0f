"""The two languages of the book agree, and each rule that says so can fail.

The rules are in ``book/parity.py``.  When both texts say the same again after a change, record it:
``python book/build.py --declare-equal [PAGE ...]`` writes ``declared_equal.json`` beside this file.
"""

import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "book"))

import build  # noqa: E402
import parity  # noqa: E402

PROSE = {
    "en": "# Ring\n\n(here)=\n## Cost\n\n% range: 0 9\n\n"
    "See {numref}`the figure <fig>`, {eq}`t`, {cite:p}`k1,k2`.",
    "ko": "# 링\n\n(here)=\n## 비용\n\n% range: 0 9\n\n"
    "{cite:p}`k1,k2`, {numref}`그림 <fig>`과 {eq}`t`를 보십시오.",
}
PAGE = {
    "en": "# Welcome\n\n[Ring](ring.ipynb) and [torch](https://pytorch.org).\n",
    "ko": "# 환영\n\n[링](ring.ipynb)과 [토치](https://pytorch.org/ko).\n",
}
CAPTION = {"en": "A ring.", "ko": "링."}


def notebook(language: str):
    figure = {"name": "fig", "caption": CAPTION[language]}
    return new_notebook(
        cells=[
            new_markdown_cell(PROSE[language], id="question"),
            new_code_cell("x = 1", id="one", metadata={"tags": ["hide-input"]}),
            new_code_cell("x", id="two", metadata={"mystnb": {"figure": figure}}),
        ]
    )


@pytest.fixture
def book(tmp_path):
    """A book that satisfies every rule."""
    for language in PAGE:
        for path in (tmp_path / "book" / language, tmp_path / "notebooks" / language):
            path.mkdir(parents=True)
        (tmp_path / "book" / language / "welcome.md").write_text(PAGE[language])
        nbformat.write(notebook(language), tmp_path / "notebooks" / language / "ring.ipynb")
    parity.declare_equal(tmp_path, [])
    assert parity.complaints(tmp_path) == []
    return tmp_path


def change(book: Path, language: str, edit) -> list[str]:
    """The complaints after an edit of one language's notebook, declared equal or not."""
    path = book / "notebooks" / language / "ring.ipynb"
    chapter = nbformat.reader.reads(path.read_text())
    edit(chapter)
    path.write_text(json.dumps(chapter))
    return parity.complaints(book)


def declare(book: Path) -> list[str]:
    parity.declare_equal(book, [])
    return parity.complaints(book)


def test_the_book_agrees_in_both_languages():
    assert parity.complaints(REPOSITORY) == []


def test_every_page_of_the_contents_exists_and_no_other():
    toc = yaml.safe_load((REPOSITORY / "_toc.yml").read_text())
    named = [toc["root"], *(page["file"] for part in toc["parts"] for page in part["chapters"])]
    assert sorted(named) == sorted(parity.read_pages(REPOSITORY, "en"))


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda nb: nb.cells[1].update(source="x = 2"), "ring, cell 'one': the code differs"),
        (lambda nb: nb.cells[1].update(source="x = 1 "), "ring, cell 'one': the code differs"),
        (lambda nb: nb.cells[1].update(id="uno"), "English 'one', Korean 'uno'"),
        (lambda nb: nb.cells[0].update(id="frage"), "English 'question', Korean 'frage'"),
        (lambda nb: nb.cells.reverse(), "cells differ in id, kind or order"),
        (lambda nb: nb.cells.pop(), "English 'two', Korean 'nothing'"),
        (lambda nb: nb.cells[1].metadata.update(tags=[]), "ring, cell 'one': the tags differs"),
        (
            lambda nb: nb.cells[2].metadata["mystnb"]["figure"].update(name="other"),
            "ring, cell 'two': the figure's name differs",
        ),
        (
            lambda nb: nb.cells[2].metadata["mystnb"]["figure"].pop("caption"),
            "ring, cell 'two': the caption (one has none) differs",
        ),
    ],
)
def test_code_cells_must_be_the_same(book, edit, complaint):
    change(book, "ko", edit)
    assert any(complaint in line for line in declare(book))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("## 비용", "### 비용", "levels of headings differ"),
        ("## 비용", "비용", "levels of headings differ"),
        ("{eq}`t`", "식", "the Korean side lacks eq t"),
        ("<fig>", "<gif>", "the Korean side lacks numref fig"),
        ("k1,k2", "k1", "the Korean side lacks cite:p k1,k2"),
        ("(here)=\n", "", "the Korean side lacks label here"),
        ("0 9", "1 9", "the Korean side lacks range 0 9"),
        ("링", "{doc}`errata`", "the English side lacks doc errata"),
    ],
)
def test_headings_and_references_must_be_the_same(book, old, new, complaint):
    def edit(chapter):
        assert old in chapter.cells[0].source
        chapter.cells[0].source = chapter.cells[0].source.replace(old, new, 1)

    change(book, "ko", edit)
    assert any(complaint in line for line in declare(book))


def test_links_within_the_book_must_be_the_same(book):
    page = book / "book/ko/welcome.md"
    page.write_text(page.read_text().replace("ring.ipynb", "tree.ipynb"))
    assert any("the Korean side lacks link ring.ipynb" in line for line in declare(book))


@pytest.mark.parametrize("path", ["book/ko/welcome.md", "notebooks/en/ring.ipynb"])
def test_a_page_must_exist_in_both(book, path):
    (book / path).unlink()
    language = "Korean" if "/ko/" in path else "English"
    assert f"{Path(path).stem}: there is no {language} page" in declare(book)


def test_a_change_of_prose_in_one_language_is_noticed(book):
    def edit(chapter):
        chapter.cells[0].source += " Fast."

    assert change(book, "en", edit) == ["ring, 'question': English changed since declared equal"]
    [complaint] = change(book, "ko", edit)
    assert complaint == "ring, 'question': English and Korean changed since declared equal"
    assert declare(book) == []


def test_a_change_of_a_page_or_a_caption_in_one_language_is_noticed(book):
    (book / "book/ko/welcome.md").write_text(PAGE["ko"] + "끝.\n")
    edited = change(
        book, "ko", lambda nb: nb.cells[2].metadata["mystnb"]["figure"].update(caption="고리.")
    )
    assert edited == [
        "ring, 'two': Korean changed since declared equal",
        "welcome, 'page': Korean changed since declared equal",
    ]


def test_a_text_never_declared_or_gone_is_noticed(book):
    for language in PAGE:
        change(book, language, lambda nb: nb.cells[0].update(id="asked"))
    assert parity.complaints(book) == [
        "ring, 'asked': never declared equal",
        "ring, 'question': declared equal, and gone since",
    ]


def test_one_page_is_declared_without_the_others(book):
    for language in PAGE:
        (book / "book" / language / "welcome.md").write_text(PAGE[language] + "\n1\n")
        change(book, language, lambda nb: nb.cells[0].update(source=nb.cells[0].source + "1"))
    parity.declare_equal(book, ["welcome"])
    assert [line.split(",")[0] for line in parity.complaints(book)] == ["ring"]
    with pytest.raises(SystemExit, match="nonesuch"):
        parity.declare_equal(book, ["nonesuch"])


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (
            lambda nb: nb.cells[1].update(outputs=[new_output("stream", text="1")]),
            "cell 'one': saved with outputs",
        ),
        (lambda nb: nb.cells[1].update(execution_count=1), "cell 'one': saved with outputs"),
        (
            lambda nb: nb.cells[1].update(source="if x:\n    !ls"),
            "cell 'one': a ! command, whose failure passes silently",
        ),
        (
            lambda nb: nb.cells[1].update(source="x\n" * 26),
            "cell 'one': 26 lines, more than 25",
        ),
        (lambda nb: nb.update(nbformat_minor=4), "not a valid notebook"),
        (lambda nb: nb.cells[1].pop("outputs"), "not a valid notebook"),
        (lambda nb: nb.cells[1].update(id="two"), "2 cells have the id 'two'"),
    ],
)
def test_the_form_of_a_saved_notebook(book, edit, complaint):
    for language in PAGE:  # alike in both: only the form is wrong
        change(book, language, edit)
    assert next(line for line in declare(book) if complaint in line).startswith("en/ring")


def test_old_formats_without_ids_are_refused():
    old = nbformat.from_dict({"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": []})
    assert parity.saved_form("en/old", old) == ["en/old: format 4.4 has no cell ids"]


def test_twenty_five_lines_are_allowed():
    cells = [new_code_cell("x\n" * 25, id="long")]
    assert parity.saved_form("en/ring", new_notebook(cells=cells)) == []


@pytest.mark.parametrize(
    "toc, words",
    [
        ("root: welcome\n", "_toc.yml: write a root, and parts with chapters"),
        ("root: welcome\nparts:\n- file: ring\n", "_toc.yml: write a root, and parts with"),
        ("parts: [", "_toc.yml cannot be read: while parsing"),
        (None, "_toc.yml cannot be read: .*No such file"),
    ],
)
def test_a_table_of_contents_without_pages_is_refused(toc, words, tmp_path, monkeypatch, capsys):
    if toc:
        (tmp_path / "_toc.yml").write_text(toc)
    monkeypatch.setattr("sys.argv", ["build.py", "--root", str(tmp_path)])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # as it was, for the tests after it
    assert build.main() == 1
    assert re.match(words, capsys.readouterr().err)
