"""Name the line of the user's code at which an error arose."""

from __future__ import annotations

import linecache
from typing import Any


def place(error: dict[str, Any], cell: list[tuple[int, str]] | None) -> str:
    """Return where in the user's code an error arose: `at line 3 of the cell: dist.all_reduce(x)`.

    If that line called a function, the text also names the place in that function.

    Args:
        error: the description of an error (see `outcome`).
        cell: the cell's lines (see `numbered`), or None if a function was run.
    """
    libraries = "site-packages", "naranhi/world", "<frozen"
    frames = [f for f in error["frames"] if not any(part in f[0] for part in libraries)]
    code = ""
    if cell and cell[0][1].split()[0] == "%%time":  # it numbers the rest from 1
        cell, code = _from_the_first(cell[1:]), "<timed "  # exec>, or eval>
    # The outermost `<module>` frame is the cell's; modules that it imports have one, too.
    modules = (i for i, frame in enumerate(frames) if frame[2] == "<module>" and code in frame[0])
    own = next(modules, None) if cell else None
    if error["syntax"] and own is None:
        return _line(error["syntax"], cell)
    inside = ""
    for index, (file, number, function, text) in reversed([*enumerate(frames)]):
        if index == own:
            return _line(number, cell) + inside
        if "/lib/python" in file or inside:
            continue
        text = text or linecache.getline(file, number).strip()
        where = "at" if function == "<module>" else f"in {function}"
        name = "" if "ipykernel" in file else f" ({file.rsplit('/', 1)[-1]}:{number})"
        inside = f"\n    {where}{name}: {text}"
    return inside


def _line(number, cell):
    if cell is None or number > len(cell):
        return ""
    shown, text = cell[number - 1]
    return f"\n    at line {shown} of the cell: {text.strip()}"


def numbered(source: str) -> list[tuple[int, str]]:
    """Return a cell's lines as the ranks count them, each with its line number in the notebook.

    Line 1 in the notebook is %%ranks; IPython skips the blank lines that follow it.
    """
    # Not `splitlines`: neither Python nor a notebook begins a line at a form feed.
    return _from_the_first(list(enumerate(source.split("\n"), start=2)))


def _from_the_first(lines):
    """Return lines without the blank ones at the beginning."""
    blank = next((n for n, (_, text) in enumerate(lines) if text.strip()), len(lines))
    return lines[blank:]
