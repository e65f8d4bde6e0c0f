"""Two executions of a notebook give the same outputs, measurements aside.

The first is the build's, or made here. The second is the recorded one (`book/outputs.py`), or,
where that differs or was made from something else, one made as a reader does by hand: ``pytest
--nbmake``. Executions are made two at a time, which takes half as long: what is measured may
differ.
"""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
sys.path.insert(0, str(BOOK))

import execution  # noqa: E402
import outputs  # noqa: E402
from execution import digest  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks" / "en").glob("*.ipynb"))


@pytest.fixture(scope="module")
def built():
    """{notebook: its first execution}."""
    command = [sys.executable, BOOK / "build.py", "--execute-only", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    executed = ROOT / "_build" / "executed"
    return {one: nbformat.read(executed / one.name, as_version=4) for one in NOTEBOOKS}


@pytest.fixture(scope="module")
def again(built, tmp_path_factory):
    """{notebook: its second execution, which may still be under way}, if its record is another.

    Another processor may round otherwise. So a record that differs proves nothing.
    """
    with ThreadPoolExecutor(2) as pool:
        yield {
            one: pool.submit(execute, one, tmp_path_factory.mktemp(one.stem))
            for one in NOTEBOOKS
            if hashes(built[one]) != outputs.recorded(built[one], one.stem, ROOT)
        }


def hashes(notebook):
    return {cell: digest(said) for cell, said in outputs.unmeasured(notebook).items()}


def execute(notebook, folder):
    """Where the executed notebook is, and what pytest said."""
    copy = Path(shutil.copy(notebook, folder))
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", copy]
    return copy, subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(1800)  # the first waits for the build
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_two_executions_say_the_same(notebook, built, again):
    first = outputs.unmeasured(built[notebook])
    assert any("✓" in said for said in first.values()), "nothing but measurements proves nothing"
    if notebook not in again:
        return  # it is what the record says
    copy, done = again[notebook].result()
    assert done.returncode == 0, done.stdout + done.stderr
    second = outputs.unmeasured(nbformat.read(copy, as_version=4))
    assert list(second) == list(first)
    for cell in first:
        assert second[cell] == first[cell], cell


def test_a_chapter_can_be_executed_by_nbmake(built, again, tmp_path):
    """As a reader does by hand, even where all records stand: the shortest one."""
    copy, done = execute(min(NOTEBOOKS, key=lambda one: seconds(built[one])), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(copy.read_text())["cells"]


def test_most_times_are_as_the_book_says(built):
    """On a machine that runs two notebooks at a time, and whatever else: so most, and not each."""
    missed = {one.stem: execution.missed(notebook) for one, notebook in built.items()}
    held = sum(
        output.text.count("measured)\n")
        for notebook in built.values()
        for cell in execution.code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "stream"
    )
    assert held > 60, "or the book has lost its measured claims"
    assert sum(map(len, missed.values())) < 0.25 * held, missed


def seconds(executed):
    return executed.metadata["naranhi"]["executed"]["seconds"]


@pytest.fixture
def book(built, tmp_path):
    """A book of one executed chapter, and its record."""
    notebook = NOTEBOOKS[0]
    for folder in ("notebooks/en", "_build/executed"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(notebook, tmp_path / "notebooks/en")
    shutil.copy(ROOT / "_build/executed" / notebook.name, tmp_path / "_build/executed")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    assert outputs.record(tmp_path) == []
    return tmp_path


def test_a_record_stands_for_what_it_was_made_from(built, book):
    notebook, executed = NOTEBOOKS[0], built[NOTEBOOKS[0]]
    assert outputs.recorded(executed, notebook.stem, book) == hashes(executed)
    for change in {"cells": "others"}, {"requirements": "others"}:
        other = nbformat.from_dict(json.loads(json.dumps(executed)))
        other.metadata["naranhi"]["key"].update(change)
        assert outputs.recorded(other, notebook.stem, book) is None, change
    printed = next(c for c in executed.cells if c.cell_type == "code" and c.outputs)
    other = nbformat.from_dict(json.loads(json.dumps(executed)))
    next(c for c in other.cells if c.id == printed.id).outputs = []
    assert hashes(other)[printed.id] != hashes(executed)[printed.id]


def test_measured_claims_are_not_compared():
    def shown(text):
        cell = new_code_cell("", id="a", outputs=[new_output("stream", text=text)])
        return outputs.unmeasured(new_notebook(cells=[cell]))

    others = "✓ b\n[rank 1] ✓ c (within 1%)\n"
    assert shown(others) == shown(
        "✓ a (measured)\n✓ b\n[ranks 0-1] ✗ d: it is false (measured: busy?)\n"
        "[rank 1] ✓ c (within 1%)\n✓ e (within 10%, measured)\n"
    )
    assert shown(others) != shown("✓ b\n")


def test_what_is_not_executed_as_it_is_has_no_record(book):
    (book / "requirements.txt").write_text("torch==0.1")
    assert outputs.record(book) == [NOTEBOOKS[0].stem]
