"""Show what the ranks printed and displayed, as the user sees it below the cell."""

from __future__ import annotations

import sys
from typing import Any

from naranhi.world.errors import named


def show(outcomes: dict[int, dict[str, Any]]) -> None:
    """Show the output of ranks in rank order; neighbours with equal output are shown once.

    Args:
        outcomes: rank -> outcome (see `outcome`).
    """
    ordered = sorted(outcomes.items())
    folded = []
    for rank, outcome in ordered:
        shown = (outcome["stdout"], outcome["stderr"], outcome["displays"])
        if folded and folded[-1][1] == shown and folded[-1][0][-1] == rank - 1:
            folded[-1][0].append(rank)
        else:
            folded.append(([rank], shown))
    for ranks, (stdout, stderr, displays) in folded:
        label = f"[{named(ranks)}]"
        texts = [d["text/plain"] for d, _ in displays if set(d) == {"text/plain"}]
        for stream, text in ((sys.stdout, stdout), (sys.stderr, stderr)):
            for line in _lines(text):
                print(label, line, file=stream)
        for text in texts:
            for line in text.splitlines():
                print(label, line)
        rich = [(data, metadata) for data, metadata in displays if set(data) != {"text/plain"}]
        if rich:
            from IPython.display import display

            print(label)
            for data, metadata in rich:
                display(data, raw=True, metadata=metadata)


def _lines(text):
    """Yield the lines of a text as a terminal would show them: of a progress bar its last state."""
    for line in text.removesuffix("\n").split("\n") if text else ():
        yield line.rstrip("\r").rpartition("\r")[2]
