"""Draw what happens at the same time: a lane for each thing that can be busy, its work as boxes.

A rank that computes while its link sends a message does two things at once. A timeline, with one
row per rank and one action at a time, cannot show that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from naranhi.show import _table
from naranhi.show._chart import COLORS, WIDTH
from naranhi.show._figure import FAINT, INK, figure
from naranhi.show._timeline import DIGIT

ROW = 0.32  # inches


def lanes(
    rows: Mapping[str, Sequence[tuple[str, int | None, float, float]]],
    alt: str,
    measured: bool = False,
    end: float | None = None,
) -> None:
    """Show lanes of boxes on one time axis, which begins with the earliest box.

    Args:
        rows: lane -> [(kind, number, start, end), ...]. The kind, at most four different ones,
            selects a box's colour and appears in the key; the number, or None, is written in the
            box if it fits.
        alt: a sentence that says what the picture shows.
        measured: True for measurements, in seconds; otherwise time has no unit.
        end: the length of the axis, to compare two drawings; default: up to the last box.

    Raises:
        ValueError: there are no boxes or more than four kinds, a box ends before it starts, or the
            axis would end before the last box.
    """
    figure(draw_lanes(rows, measured, end), alt, measured=measured)


def draw_lanes(
    rows: Mapping[str, Sequence[tuple[str, int | None, float, float]]],
    measured: bool = False,
    end: float | None = None,
) -> Figure:
    """Draw the figure of `lanes`."""
    boxes = [box for row in rows.values() for box in row]
    kinds = list(dict.fromkeys(kind for kind, *_ in boxes))
    if not 0 < len(kinds) <= len(COLORS):
        raise ValueError(f"boxes of one to {len(COLORS)} kinds can be told apart, not {kinds}")
    if backwards := [box for box in boxes if box[3] < box[2]]:
        raise ValueError(f"a box ends before it starts: {backwards[0]}")
    first, last = min(box[2] for box in boxes), max(box[3] for box in boxes)
    length = last - first if end is None else end
    if length < last - first:
        raise ValueError(f"the axis would end at {end}, the last box at {last - first}")
    length = length or 1.0
    fig = Figure(figsize=(WIDTH, 0.85 + ROW * len(rows)), layout="constrained")
    ax = fig.add_subplot()
    ax.set(xlim=(0, length), ylim=(len(rows), 0))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelcolor=INK, labelsize=9)
    ax.set_yticks([place + 0.5 for place in range(len(rows))], list(rows))
    ax.xaxis.set_major_formatter(
        lambda value, _: _table.seconds(value) if measured and value else _table.number(value)
    )
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    colors = dict(zip(kinds, COLORS, strict=False))
    inch = length / (WIDTH - 1.3)  # about, in units of time
    for place, row in enumerate(rows.values()):
        ax.plot([0, length], [place + 0.5] * 2, color=FAINT, linewidth=0.6, alpha=0.6, zorder=1)
        for kind, number, start, stop in row:
            _draw_box(ax, place, colors[kind], number, start - first, stop - start, inch)
    ax.legend(
        [Rectangle((0, 0), 1, 1, color=color, lw=0) for color in colors.values()],
        kinds,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        ncols=len(kinds),
        fontsize=9.5,
        labelcolor=INK,
        borderpad=0,
        borderaxespad=0.5,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.4,
    )
    return fig


def _draw_box(ax, place, color, number, start, duration, inch):
    gap = min(0.012 * inch, duration / 5)  # so that two boxes that touch look like two
    ax.add_patch(
        Rectangle(
            (start, place + 0.08), duration - gap, 0.84, facecolor=color, linewidth=0, zorder=2
        )
    )
    text = "" if number is None else str(number)
    if text and len(text) * DIGIT * inch < duration - gap:
        ax.text(
            start + (duration - gap) / 2,
            place + 0.5,
            text,
            color="white",
            fontsize=9,
            weight="bold",
            ha="center",
            va="center_baseline",
            zorder=3,
        )
