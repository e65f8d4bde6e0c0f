"""Draw charts in the house style: few lines, labels beside what they name, four colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib import ticker
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, DrawingArea, HPacker, TextArea

from naranhi.show import _table
from naranhi.show._colors import COLORS
from naranhi.show._figure import FAINT, INK, house_style, literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 5.4  # inches: 518 px, so that 10 pt letters are still readable at 360 px
BINARY = [(base, (1,)) for base in (256, 16, 4, 2)]
DECIMAL = [(10_000, (1,)), (100, (1,)), (10, (1,)), (10, (1, 2, 5))]
UNITS = {"size": _table.size, "seconds": _table.seconds, "rate": _table.rate}


@house_style
def axes(
    xlabel: str, ylabel: str, x: str = "linear", y: str = "linear", height: float = 3.0
) -> tuple[Figure, Axes]:
    """Make an empty chart in the house style. Show it with `show.figure`.

    Args:
        xlabel: the title of the x axis.
        ylabel: the title of the y axis.
        x: the scale of the x axis: "linear", "log", or a logarithmic scale of "size" (bytes, in
            powers of two), "seconds" or "rate" (bytes a second).
        y: the scale of the y axis, with the same choices.
        height: in inches; the width is the book's.

    Returns:
        A matplotlib figure and its axes.

    Raises:
        ValueError: a scale is not one of these.
    """
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    ax = fig.add_subplot()
    style(ax)
    for name, scale in (("x", x), ("y", y)):
        _scale(ax, name, scale)
    ax.grid(axis="y", color=FAINT, alpha=0.35, linewidth=0.6)
    ax.set_xlabel(literal(xlabel), color=INK, fontsize=10)
    # Above the axis and horizontal, where it takes no width and is easy to read.
    ax.set_title(literal(ylabel), loc="left", x=0, color=INK, fontsize=10, pad=10)
    return fig, ax


def style(ax: Axes) -> None:
    """Remove lines that show no data, and draw the rest in the page's colours."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(which="both", color=FAINT, labelcolor=INK, labelsize=9)
    ax.tick_params(which="minor", length=0)
    ax.set_axisbelow(True)


def _scale(ax, name, scale):
    axis = getattr(ax, f"{name}axis")
    if scale == "linear":
        axis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 5, 10]))
    elif scale == "log" or scale in UNITS:
        ax.set(**{f"{name}scale": "log"})
        axis.set_major_locator(_LogTicks(BINARY if scale == "size" else DECIMAL))
        axis.set_minor_locator(ticker.NullLocator())
    else:
        raise ValueError(f"a scale is linear, log, size, seconds or rate, not {scale!r}")
    write = UNITS.get(scale, _table.number)
    axis.set_major_formatter(lambda value, _: write(value))


class _LogTicks(ticker.Locator):
    """Place round values on a logarithmic axis.

    Of the given ways to choose them, use the one that yields the most ticks, up to six. A way is a
    base and the factors by which its powers are multiplied.
    """

    def __init__(self, ways):
        self.ways = ways

    def __call__(self):
        low, high = sorted(self.axis.get_view_interval())
        chosen = []
        for base, factors in self.ways:
            powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
            ticks = [factor * float(base) ** power for power in powers for factor in factors]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(chosen) < len(ticks) <= 6:
                chosen = ticks
        return chosen if len(chosen) > 1 else ticker.MaxNLocator(4).tick_values(low, high)


@house_style
def measured(
    ax: Axes,
    x: Sequence[float],
    y: Sequence[float],
    label: str | None = None,
    color: str = COLORS[0],
) -> None:
    """Draw measurements: points, labelled at the height of the last point."""
    ax.plot(x, y, "o", color=color, markersize=5, markeredgewidth=0)
    _label(
        ax, y, label, Line2D([6.3], [3.4], marker="o", color=color, markersize=5, markeredgewidth=0)
    )


@house_style
def predicted(
    ax: Axes,
    x: Sequence[float],
    y: Sequence[float],
    label: str | None = None,
    color: str = COLORS[0],
) -> None:
    """Draw what a formula predicts: a dashed line, labelled at the height of its end."""
    dashes = {"color": color, "linewidth": 1.4, "dashes": (3.5, 2)}
    ax.plot(x, y, zorder=1.8, **dashes)
    _label(ax, y, label, Line2D([0, 12.6], [3.4, 3.4], **dashes))


def _label(ax, y, text, key):
    """Write the text in ink after a key in the line's own colour, as high as the last point.

    The label is right of the axes, where the key is not mistaken for data. `svg` keeps labels
    apart. Points that the axes cannot show (NaN, infinity, 0 on a logarithmic scale) do not count;
    without any other point the label is halfway up.
    """
    if text:
        log = ax.get_yscale() == "log"
        shown = [v for v in map(float, y) if math.isfinite(v) and (v > 0 or not log)]
        place = (1, shown[-1]) if shown else (1, 0.5)
        picture = DrawingArea(12.6, 7)
        picture.add_artist(key)
        words = TextArea(literal(text), textprops={"color": INK, "fontsize": 9.5})
        ax.add_artist(
            AnnotationBbox(
                HPacker(children=[picture, words], align="center", pad=0, sep=4),
                place,
                xycoords=("axes fraction", "data" if shown else "axes fraction"),
                xybox=(6, 0),
                boxcoords="offset points",
                box_alignment=(0, 0.5),
                frameon=False,
                pad=0.1,
                gid="label",
                annotation_clip=False,
            )
        )


@house_style
def bars(
    values: Mapping[str, float],
    xlabel: str,
    unit: Callable[[float], str] | None = None,
    colors: str | Sequence[str] | None = None,
) -> Figure:
    """Draw horizontal bars from zero, with their values at their ends. Show with `show.figure`.

    Args:
        values: label -> value, finite and 0 or more.
        xlabel: the title above the bars.
        unit: how to write a value, for example `show.seconds`; default: as a plain number.
        colors: one colour, or one for each bar; default: the book's first.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: there are no values, or a value cannot be a bar.
    """
    write = unit or _table.number
    if not values or any(not math.isfinite(v) or v < 0 for v in values.values()):
        raise ValueError(f"bars start from zero: give values, finite and at least 0, not {values}")
    fig = Figure(figsize=(WIDTH, 0.55 + 0.34 * len(values)), layout="constrained")
    ax = fig.add_subplot()
    style(ax)
    ax.spines["bottom"].set_visible(False)
    places = range(len(values))
    ax.barh(places, values.values(), height=0.56, color=colors or COLORS[0], linewidth=0)
    for place, value in zip(places, values.values(), strict=True):
        ax.annotate(
            write(value),
            (value, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9.5,
        )
    ax.set_yticks(places, map(literal, values))
    ax.tick_params(axis="y", length=0, labelsize=9.5)
    ax.invert_yaxis()
    ax.set_xticks([])
    ax.set_xlim(left=0)
    ax.set_title(literal(xlabel), loc="left", x=0, color=INK, fontsize=10, pad=8)
    return fig
