"""Show the answer to a prediction that a chapter asks its reader for."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from IPython.display import display

from naranhi.show._table import number

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def answer(name: str, *, formula: Any = None, measured: Any = None) -> None:
    """Show the answers of a formula and of the ranks to the question with this name.

    The page sets both beside the reader's guess, so they are in the unit of the question.

    Args:
        name: the name of the question, `% name: NAME` in the admonition before this cell.
        formula: what a formula or a simulation says, a number; None where there is none.
        measured: what ranks measured or counted, a number; None where they did not.

    Raises:
        ValueError: the name is not words of lowercase letters and digits joined by hyphens, neither
            number is given, or one is not finite.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a question; write words joined by hyphens: a-name")
    given = {"formula": formula, "measured": measured}
    values = {kind: _plain(kind, value) for kind, value in given.items() if value is not None}
    if not values:
        raise ValueError(f"{name}: an answer needs formula=, measured=, or both")
    data = "".join(f' data-{kind}="{json.dumps(value)}"' for kind, value in values.items())
    rows = "".join(
        f'<tr><th scope="row" style="text-align:left;padding:.3em .8em">{kind}</th>'
        f'<td style="text-align:right;padding:.3em .8em">{number(value)}</td></tr>'
        for kind, value in values.items()
    )
    display(
        {
            "text/html": f'<table class="naranhi-answer" data-answer="{name}"{data}>{rows}</table>',
            "text/plain": "\n".join(f"{kind:8}  {number(value)}" for kind, value in values.items()),
        },
        metadata={"naranhi": {"measured": True}} if "measured" in values else None,
        raw=True,
    )


def _plain(kind, value):
    """Return a number of torch, NumPy or Python as Python's int or float."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{kind}={value!r}: an answer is a finite number")
    return value
