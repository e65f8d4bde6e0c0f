"""Draw one micro-batch on its way through a pipeline and back: a picture that can move.

The numbers and the times are those of a simulated timeline. No script is used: a style sheet
inside the picture moves one frame. Where nothing should move (on paper, or for readers who ask
their system for less motion) the frame is absent, and the numbers show the order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from IPython.display import display
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle

from naranhi.show._blocks import ARROW, canvas
from naranhi.show._colors import KINDS
from naranhi.show._contrast import text_on
from naranhi.show._figure import FAINT, INK, ROOT_COLOR, SVG, house_style, svg_root

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from naranhi.schedules import Timeline

UNIT = 0.46  # inches
WIDE, HIGH = 1.5, 0.8  # units, of the box of an action
STEP = 2.65  # units, from one rank to the next
TOP, LANE = 1.0, 1.3  # units, above the boxes; from the forward passes to the backward passes
ROWS = {kind: KINDS[kind] for kind in "FB"}
REST = 0.12  # the fraction of a round in which the frame stays where the journey ended
MOVE = 0.015  # the smallest fraction of a round for a move


def journey(timeline: Timeline, seconds: float = 9.0) -> None:
    """Show where a micro-batch is, action by action, on its way through all stages and back.

    Args:
        timeline: a simulated timeline of one micro-batch, with one stage per rank; its times set
            the pace.
        seconds: the duration of a round; a checkbox pauses it.

    Raises:
        ValueError: `timeline` is not such a timeline, or `seconds` is not positive.
    """
    spans = sorted(
        (span.start, span.end, rank, span.action.kind)
        for rank, row in enumerate(timeline)
        for span in row
    )
    there = [(rank, "F") for rank in range(len(timeline))]
    back = [(rank, "B") for rank, _ in reversed(there)]
    if [(rank, kind) for _, _, rank, kind in spans] != there + back:
        raise ValueError("a journey is that of one micro-batch through all stages and back")
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, not {seconds}")
    alt = (
        f"A micro-batch goes through {len(timeline)} ranks: first the forward passes, from rank "
        f"0 to the last, each handing an activation on; then the backward passes, from the last "
        f"to rank 0, each handing back a gradient. {len(spans)} actions, one after the other."
    )
    fig = draw_journey(spans)
    data = {"text/html": _moving(fig, alt, spans, seconds), "text/plain": f"[figure: {alt}]"}
    pyplot.close(fig)
    display(data, raw=True)


@house_style
def draw_journey(spans: Sequence[tuple[float, float, int, str]]) -> Figure:
    """Draw the figure of `journey`, without the frame, from (start, end, rank, kind) tuples."""
    ranks = len(spans) // 2
    fig, ax = canvas(STEP * (ranks - 1) + WIDE + 2.15, TOP + LANE + HIGH + 0.9, UNIT)
    for number, (_, _, rank, kind) in enumerate(spans, 1):
        x, y = _corner(rank, kind)
        name, color = ROWS[kind]
        ax.add_patch(Rectangle((x, y), WIDE, HIGH, facecolor=color, linewidth=0))
        ax.text(
            x + WIDE / 2,
            y + HIGH / 2,
            str(number),
            color=text_on(color),
            fontsize=11,
            weight="bold",
            ha="center",
            va="center_baseline",
        )
        if rank == 0:
            ax.text(0, y + HIGH / 2, name, color=INK, fontsize=9.5, va="center_baseline")
        if kind == "F":
            ax.text(
                x + WIDE / 2,
                0.4,
                f"rank {rank}",
                color=INK,
                fontsize=9.5,
                ha="center",
                va="center_baseline",
            )
    for (_, _, rank, kind), (_, _, to, other) in pairwise(spans):
        start, end = _corner(rank, kind), _corner(to, other)
        if rank == to:
            ax.add_patch(
                _arrow((start[0] + WIDE / 2, start[1] + HIGH), (end[0] + WIDE / 2, end[1]))
            )
        else:
            across = WIDE if to > rank else 0
            y = start[1] + HIGH / 2
            ax.add_patch(_arrow((start[0] + across, y), (end[0] + WIDE - across, y)))
    # Name what is sent once, in the middle of the way.
    middle = _corner(0, "F")[0] + WIDE + (STEP - WIDE) / 2
    ax.text(middle, TOP - 0.12, "activation", color=INK, fontsize=9, ha="center", va="baseline")
    ax.text(
        middle, TOP + LANE + HIGH + 0.12, "gradient", color=INK, fontsize=9, ha="center", va="top"
    )
    return fig


def _corner(rank, kind):
    """Return the upper left corner of the box of an action, in units."""
    return 2.0 + STEP * rank, TOP + (LANE if kind == "B" else 0)


def _arrow(start, end):
    return FancyArrowPatch(
        start, end, arrowstyle=ARROW, color=FAINT, linewidth=1.4, shrinkA=3, shrinkB=3
    )


def _moving(fig, alt, spans, seconds):
    """Return the figure as HTML: a checkbox, the <svg>, and the style that moves a frame in it."""
    root, width, _ = svg_root(fig, alt)
    unit = 72 * UNIT  # points, the unit of the picture
    margin = 0.08
    frame = {
        "class": "frame",
        "x": f"{-margin * unit:g}",
        "y": f"{-margin * unit:g}",
        "width": f"{(WIDE + 2 * margin) * unit:g}",
        "height": f"{(HIGH + 2 * margin) * unit:g}",
        "rx": "4",
        "fill": "none",
        "stroke": "currentColor",
        "stroke-width": "2.4",
        "display": "none",
    }
    ElementTree.SubElement(root, f"{{{SVG}}}rect", frame)
    root.set("style", f"display:block;width:100%;max-width:{width:.0f}px;height:auto;{ROOT_COLOR}")
    whole = (spans[-1][1] - spans[0][0]) / (1 - REST)
    stops = []
    for (start, end, rank, kind), following in zip_longest(spans, spans[1:]):
        x, y = _corner(rank, kind)
        # With no time between two actions, the frame leaves early, so that its move is visible.
        leave = min(end, following[0] - MOVE * whole) if following else spans[0][0] + whole
        at = [f"{100 * float((time - spans[0][0]) / whole):.2f}%" for time in (start, leave)]
        stops.append(f"{','.join(at)}{{transform:translate({x * unit:g}px,{y * unit:g}px)}}")
    steps, drawn = "".join(stops), ElementTree.tostring(root, encoding="unicode")
    # Names unique on the page, also for the same picture at another pace.
    name = "n" + hashlib.sha256(f"{drawn}{steps}{seconds:g}".encode()).hexdigest()[:8]
    return f"""<div class="{name}"><style>
.{name}>input,.{name}>label{{display:none;font-size:.85em;vertical-align:middle}}
@media screen and (prefers-reduced-motion:no-preference){{
.{name}>input,.{name}>label{{display:inline-block}}
.{name} .frame{{display:inline;animation:{name} {seconds:g}s linear infinite}}
.{name}>input:checked~svg *{{animation-play-state:paused}}}}
@keyframes {name}{{{steps}}}
</style><input type="checkbox" id="{name}-pause"><label for="{name}-pause">&nbsp;pause</label>
{drawn}</div>"""
