"""Draw what happens at the same time: a lane for each thing that can be busy, its work as boxes.

A rank that computes while its link sends a message does two things at once. A timeline, with one
row per rank and one action at a time, cannot show that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from naranhi.show._chart import WIDTH
from naranhi.show._colors import COLORS
from naranhi.show._figure import figure, house_style
from naranhi.show._timeline import ROW, draw_box, draw_key, draw_rows


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
        ValueError: there are no boxes or more than four kinds, a box ends before it starts or at a
            time that is not finite, or the axis would end before the last box.
    """
    figure(draw_lanes(rows, measured, end), alt, measured=measured)


@house_style
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
    if unbounded := [box for box in boxes if not all(map(math.isfinite, box[2:]))]:
        raise ValueError(f"a box begins and ends at finite times: {unbounded[0]}")
    if backwards := [box for box in boxes if box[3] < box[2]]:
        raise ValueError(f"a box ends before it starts: {backwards[0]}")
    first, last = min(box[2] for box in boxes), max(box[3] for box in boxes)
    length = last - first if end is None else end
    if length < last - first:
        raise ValueError(f"end = {end} is before the end of the last box, {last - first}")
    length = length or 1.0
    fig, ax = draw_rows(len(rows), dict(enumerate(rows)), length, ROW, measured)
    colors = dict(zip(kinds, COLORS, strict=False))
    wide = length / (WIDTH - 1.3)  # about an inch, in units of time
    for place, row in enumerate(rows.values()):
        for kind, number, start, stop in row:
            draw_box(ax, place, colors[kind], number, start - first, stop - start, wide)
    draw_key(
        ax, {kind: Rectangle((0, 0), 1, 1, color=color, lw=0) for kind, color in colors.items()}
    )
    return fig
