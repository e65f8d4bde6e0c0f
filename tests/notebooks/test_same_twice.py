"""Two executions of a notebook give the same outputs, measurements aside.

The first is the build's, or made here; the second is what a reader does by hand:
``pytest --nbmake``.  Both two at a time, which takes half as long: what is measured may differ.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks" / "en").glob("*.ipynb"))


@pytest.fixture(scope="module")
def built():
    command = [sys.executable, ROOT / "book" / "build.py", "--execute-only", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "_build" / "executed"


@pytest.fixture(scope="module")
def again(built, tmp_path_factory):
    """{notebook: its second execution, which may still be under way}."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            one: pool.submit(execute, one, tmp_path_factory.mktemp(one.stem)) for one in NOTEBOOKS
        }


def execute(notebook, folder):
    """Where the executed notebook is, and what pytest said."""
    copy = Path(shutil.copy(notebook, folder))
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", copy]
    return copy, subprocess.run(command, capture_output=True, text=True, check=False)


def unmeasured(path):
    """For each code cell, by id, what it shows and does not mark as a measurement."""
    cells = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            cells[cell.id] = _said(cell.outputs)
    return cells


def _said(outputs):
    """What each stream says as a whole (a kernel may send it in parts), then all else in order."""
    streams = {"stdout": "", "stderr": ""}
    rest = []
    for output in outputs:
        match output.output_type:
            case "stream":
                streams[output.name] += output.text
            case "error":
                rest.append((output.ename, output.evalue))
            case _ if not _measured(output):
                rest.append(sorted(output.data.items()))
    return streams, rest


def _measured(output):
    return output.get("metadata", {}).get("naranhi", {}).get("measured", False)


@pytest.mark.timeout(1800)  # the first waits for the build
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_two_executions_say_the_same(notebook, built, again):
    copy, done = again[notebook].result()
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = unmeasured(built / notebook.name), unmeasured(copy)
    assert list(second) == list(first)
    for cell in first:
        assert second[cell] == first[cell], cell
    assert any(streams["stdout"] for streams, _ in first.values()), (
        "nothing but measurements would prove nothing"
    )
