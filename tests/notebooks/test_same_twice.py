"""Two executions of a notebook give the same outputs, measurements aside.

The first is the build's, or made here; the second is what a reader does by hand:
``jupyter nbconvert --execute``.
"""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks" / "en").glob("*.ipynb"))


@pytest.fixture(scope="module")
def built():
    command = [sys.executable, ROOT / "book" / "build.py", "--execute-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "_build" / "executed"


def unmeasured(path):
    """For each code cell, by id, what it shows and does not mark as a measurement."""
    cells = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            cells[cell.id] = [_said(output) for output in cell.outputs if not _measured(output)]
    return cells


def _measured(output):
    return output.get("metadata", {}).get("naranhi", {}).get("measured", False)


def _said(output):
    match output.output_type:
        case "stream":
            return output.name, output.text
        case "error":
            return output.ename, output.evalue
        case _:
            return sorted(output.data.items())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_two_executions_say_the_same(notebook, built, tmp_path):
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to=notebook", "--execute"]
    done = subprocess.run(
        [*command, f"--output-dir={tmp_path}", notebook],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = unmeasured(built / notebook.name), unmeasured(tmp_path / notebook.name)
    assert list(second) == list(first)
    for cell in first:
        assert second[cell] == first[cell], cell
    assert any(first.values()), "nothing but measurements would prove nothing"
