"""Draw a machine's memories and links, from the nearest to the farthest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.figure import Figure

from naranhi.show._chart import WIDTH, style
from naranhi.show._colors import COLORS
from naranhi.show._figure import FAINT, INK, figure, house_style
from naranhi.show._table import rate, size

SOURCES = {"measured": COLORS[0], "datasheet": "none"}


def hierarchy(levels: Sequence[dict[str, Any]]) -> None:
    """Show the levels of a memory hierarchy: bandwidth and capacity, on logarithmic axes.

    Args:
        levels: dicts, the nearest level first, with `name`, `bandwidth` (bytes a second, one way),
            `capacity` (bytes; None for a link) and `source` ("measured" or "datasheet"). With a
            measured level the output is marked as a measurement.

    Raises:
        ValueError: there are no levels, or a level cannot be drawn.
    """
    for level in levels:
        if set(level) != {"name", "bandwidth", "capacity", "source"}:
            raise ValueError(f"a level has name, bandwidth, capacity and source, not {level}")
        if level["source"] not in SOURCES:
            raise ValueError(f"a source is measured or datasheet, not {level['source']!r}")
        if not level["bandwidth"] > 0 or not (level["capacity"] is None or level["capacity"] > 0):
            raise ValueError(f"bandwidth and capacity are positive: {level}")
    if not levels:
        raise ValueError("there is no level to draw")
    words = [
        f"{level['name']} {rate(level['bandwidth'])}"
        + (f", {size(level['capacity'])}" if level["capacity"] else "")
        + f" ({level['source']})"
        for level in levels
    ]
    figure(
        draw(levels),
        "Bandwidth and capacity of each level: " + "; ".join(words) + ".",
        measured=any(level["source"] == "measured" for level in levels),
    )


@house_style
def draw(levels: Sequence[dict[str, Any]]) -> Figure:
    """Draw the figure of `hierarchy`."""
    fig = Figure(figsize=(WIDTH, 0.85 + 0.36 * len(levels)), layout="constrained")
    left, right = fig.subplots(1, 2, sharey=True, width_ratios=(1, 1))
    for ax, key, title, write in (
        (left, "bandwidth", "bandwidth", rate),
        (right, "capacity", "capacity", size),
    ):
        style(ax)
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.set_xscale("log", base=10 if key == "bandwidth" else 2)
        for place, level in enumerate(levels):
            if level[key] is None:
                continue
            ax.plot(
                level[key],
                place,
                "o",
                color=COLORS[0],
                markersize=7,
                markeredgewidth=1.6,
                markerfacecolor=SOURCES[level["source"]],
            )
            ax.annotate(
                write(level[key]),
                (level[key], place),
                (8, 0),
                va="center",
                textcoords="offset points",
                color=INK,
                fontsize=9,
            )
        ax.set_title(title, loc="left", x=0, color=INK, fontsize=10, pad=8)
        ax.grid(axis="x", color=FAINT, alpha=0.35, linewidth=0.6)
        ax.xaxis.set_major_locator(ticker.LogLocator(base=10 if key == "bandwidth" else 1024))
        ax.xaxis.set_major_formatter(lambda value, _, write=write: write(value))
        ax.xaxis.set_minor_locator(ticker.NullLocator())
        ax.tick_params(axis="x", length=0, labelsize=8)
        ax.tick_params(axis="y", length=0, labelsize=9.5)
        low, high = ax.get_xlim()
        ax.set_xlim(low / (high / low) ** 0.05, high * (high / low) ** 0.35)
    left.set_ylim(len(levels) - 0.4, -0.6)
    left.set_yticks(range(len(levels)), [level["name"] for level in levels])
    right.tick_params(axis="y", labelleft=False)
    key = ["● measured", "○ datasheet"]
    used = [
        k
        for k, source in zip(key, SOURCES, strict=True)
        if any(level["source"] == source for level in levels)
    ]
    fig.supxlabel("    ".join(used), color=INK, fontsize=9, x=0.99, ha="right")
    return fig
