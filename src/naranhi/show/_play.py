"""Animate a timeline: the picture of `show.timeline`, drawn from left to right as time passes.

No script is used: a style sheet inside the picture moves its clipping rectangle. Where nothing
should move (on paper, or for readers who ask their system for less motion) the picture is complete.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from IPython.display import display
from matplotlib import pyplot

from naranhi.show._figure import ROOT_COLOR, SVG, svg_root
from naranhi.show._timeline import draw_timeline, row_in_words

if TYPE_CHECKING:
    from naranhi.schedules import Timeline

HOLD = 0.2  # the fraction of a round in which the complete picture is shown


def play(timeline: Timeline, end: float | None = None, seconds: float = 12.0) -> None:
    """Show a simulated timeline being filled, over and over; a checkbox pauses it.

    Args:
        timeline: as for `show.timeline`.
        end: as for `show.timeline`.
        seconds: the duration of a round.

    Raises:
        ValueError: the axis would end before the last box, or `seconds` is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, not {seconds}")
    alt = f"A simulated timeline of {len(timeline)} ranks, drawn as time goes by. " + " ".join(
        row_in_words(rank, row) for rank, row in enumerate(timeline)
    )
    fig = draw_timeline(timeline, end=end)
    data = {"text/html": _moving(fig, alt, seconds), "text/plain": f"[figure: {alt}]"}
    pyplot.close(fig)
    display(data, raw=True)


def _moving(fig, alt, seconds):
    """Return the figure as HTML: a checkbox, the <svg>, and the style that moves it."""
    (ax,) = fig.axes
    for text in ax.texts:
        text.set_clip_on(True)
    for line in ax.lines:
        line.set_clip_on(False)
    root, width, _ = svg_root(fig, alt)
    # matplotlib clips everything inside the axes by one rectangle: the one to move.
    clip = next(root.iter(f"{{{SVG}}}clipPath"))
    window = clip[0]
    picture = clip.get("id").partition("-")[0]
    # The name depends on the pace, or one style would set two pictures.
    name = "n" + hashlib.sha256(f"{picture}{seconds:g}".encode()).hexdigest()[:8]
    left, top, wide, high = (float(window.get(key)) for key in ("x", "y", "width", "height"))
    window.set("class", "window")
    now = {
        "class": "now",
        "x1": f"{left:g}",
        "x2": f"{left:g}",
        "y1": f"{top - 2:g}",
        "y2": f"{top + high + 2:g}",
        "stroke": "currentColor",
        "stroke-width": "1.2",
        "opacity": "0",
    }
    ElementTree.SubElement(root, f"{{{SVG}}}line", now)
    root.set("style", f"display:block;width:100%;max-width:{width:.0f}px;height:auto;{ROOT_COLOR}")
    drawn = ElementTree.tostring(root, encoding="unicode").replace(picture, name)
    stop = f"{100 * (1 - HOLD):g}%"
    return f"""<div class="{name}"><style>
.{name}>input,.{name}>label{{display:none;font-size:.85em;vertical-align:middle}}
@media screen and (prefers-reduced-motion:no-preference){{
.{name}>input,.{name}>label{{display:inline-block}}
.{name} .window{{transform-origin:{left:g}px 0;\
animation:{name}-window {seconds:g}s linear infinite}}
.{name} .now{{animation:{name}-now {seconds:g}s linear infinite}}
.{name}>input:checked~svg *{{animation-play-state:paused}}}}
@keyframes {name}-window{{0%{{transform:scaleX(0)}}{stop},100%{{transform:scaleX(1)}}}}
@keyframes {name}-now{{0%{{transform:translateX(0);opacity:.8}}\
{stop}{{transform:translateX({wide:g}px);opacity:.8}}\
{float(stop[:-1]) + 0.1:g}%,100%{{transform:translateX({wide:g}px);opacity:0}}}}
</style><input type="checkbox" id="{name}-pause"><label for="{name}-pause">&nbsp;pause</label>
{drawn}</div>"""
