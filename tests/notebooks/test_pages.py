"""The pages that do not run: what they show is run here, and has to say what the page says.

On a page, a ``python`` block is a cell of one notebook, and a ``text`` block right after it is
what that cell shows. A block whose first line is ``# name.py`` is a file, and the ``console``
blocks that call torchrun run it.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from kernels import without_tcp
from nbclient import NotebookClient
from particles import misfits

from naranhi import train

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
PAIRS = {
    "welcome": ("book/en/welcome.md", "book/ko/welcome.md"),
    "how_to_read": ("book/en/how_to_read.md", "book/ko/how_to_read.md"),
    "map": ("book/en/map.md", "book/ko/map.md"),
    "readme": ("README.md", "README.ko.md"),
}


def blocks(path):
    return FENCE.findall((ROOT / path).read_text())


def shown(cell):
    """What a reader sees below a cell, as text."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "error":
            texts.append("\n".join(output.traceback))
        elif output.output_type == "stream":
            texts.append(output.text)
        else:
            texts.append(output.data["text/plain"])
    return "\n".join(text.rstrip("\n") for text in texts)


@pytest.mark.parametrize(
    "text",
    [
        *("식 (7.1)를", "그림 2이", "$n$는", "$p$은", "3로", "7으로", "$2n$는"),
        *("[「통신」](a.ipynb)와", "**랭크(rank)**은", "`값`를"),
    ],
)
def test_particles_that_do_not_fit_are_seen(text):
    [seen] = misfits(text)
    assert text.endswith(seen)


def test_particles_fit_the_sound_before_them():
    right = (
        "그림 2가, 그림 10.1은 식 (7.1)을 1로 3으로 $n$은 $p$는 「통신」과 GPT-2를 Llama 3는 1/4이"
    )
    assert misfits(right) == []
    for page in sorted((ROOT / "book/ko").glob("*.md")):
        assert misfits(page.read_text()) == [], page.name
    for chapter in sorted((ROOT / "notebooks/ko").glob("*.ipynb")):
        for cell in nbformat.read(chapter, as_version=4).cells:
            if cell.cell_type == "markdown":
                assert misfits(cell.source) == [], (chapter.stem, cell.id)


@pytest.mark.parametrize("language", ["en", "ko"])
def test_links_can_be_followed_in_the_folder_of_the_notebooks(language):
    """As in JupyterLab: there, each page of `book` is beside the chapters, by a symbolic link."""
    folder = ROOT / "notebooks" / language
    pages = [page.name for page in (ROOT / "book" / language).glob("*.md")]
    texts = [(folder / page).read_text() for page in pages]
    for chapter in folder.glob("*.ipynb"):
        cells = nbformat.read(chapter, as_version=4).cells
        texts += [cell.source for cell in cells if cell.cell_type == "markdown"]
    linked = {link for text in texts for link in re.findall(r"\]\(([\w.-]+\.(?:md|ipynb))\b", text)}
    assert linked & set(pages)
    assert [link for link in linked if not (folder / link).is_file()] == []


@pytest.mark.parametrize("page", PAIRS)
def test_examples_are_the_same_in_both_languages(page):
    english, korean = (blocks(path) for path in PAIRS[page])
    assert english == korean


@pytest.mark.parametrize("page", ["welcome", "how_to_read", "map"])
def test_cells_show_what_the_page_says(page):
    found = blocks(PAIRS[page][0])
    cells, expected = [], []
    for position, (language, text) in enumerate(found):
        if language == "python" and not FILE.match(text):
            following = found[position + 1] if position + 1 < len(found) else ("", "")
            cells.append(nbformat.v4.new_code_cell(text.rstrip("\n")))
            expected.append(following[1].rstrip("\n") if following[0] == "text" else "")
    notebook = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory() as sockets:
        options = {"kernel_name": "python3", "timeout": 90, "allow_errors": True}
        NotebookClient(notebook, config=without_tcp(sockets), **options).execute()
    assert expected
    assert [shown(cell) for cell in cells] == expected


@pytest.mark.parametrize("page", ["how_to_read", "readme"])
def test_scripts_run_under_torchrun(page, tmp_path):
    ran = 0
    for language, text in blocks(PAIRS[page][0]):
        if language == "python" and (file := FILE.match(text)):
            (tmp_path / file[1]).write_text(text)
        if language == "console" and text.startswith("$ torchrun "):
            command, _, expected = text.removeprefix("$ torchrun ").partition("\n")
            if "-m naranhi.train" in command:  # minutes of training; its own tests run it
                train.parse(shlex.split(command.partition("-m naranhi.train")[2]))
                continue
            if "src/recipes/" in command:  # likewise
                assert (ROOT / command.split()[-1]).is_file()
                continue
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert (done.returncode, done.stdout) == (0, expected), done.stderr
            ran += 1
    assert ran == 1
