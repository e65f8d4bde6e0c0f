"""Draw a simulated or a measured timeline alike: which rank did what, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from naranhi.schedules.schedule import SHARDING
from naranhi.show import _table
from naranhi.show._chart import WIDTH
from naranhi.show._colors import KINDS
from naranhi.show._contrast import text_on
from naranhi.show._figure import FAINT, INK, figure, house_style, literal

if TYPE_CHECKING:
    from naranhi.schedules import Timeline

FULL, UPPER, LOWER = (0.08, 0.84), (0.08, 0.41), (0.51, 0.41)  # parts of a row: from, height
WORK, TRANSFER = (0.08, 0.6), (0.72, 0.2)  # if a row also has transfers behind its work
ROW = 0.32  # inches
DIGIT = 0.085  # inches, the width of a digit of a micro-batch's number


def timeline(timeline: Timeline, measured: bool = False, end: float | None = None) -> None:
    """Show what each rank does when: a row is a rank, a box an action, a gap is waiting.

    The number in a box, if there is room, is the micro-batch's. If a rank has several chunks of the
    model, the boxes of the first chunk are opaque; those of later chunks are paler and framed. A
    forward and a backward that ran at the same time share their row: two boxes of half the height.
    Gathers and reductions behind a rank's work are drawn below it, with a stroke where a stage is
    freed.

    Args:
        timeline: the timeline to draw.
        measured: True for a measured timeline, whose times are in seconds; a simulated timeline has
            no unit.
        end: the length of the time axis, to compare two drawings; default: up to the last box.

    Raises:
        ValueError: the axis would end before the last box.
    """
    bubble = f"{float(timeline.bubble_rate):.0%}"
    words = "measured" if measured else "simulated"
    alt = (
        f"A {words} timeline of {len(timeline)} ranks, in which {bubble} of the time is the "
        f"bubble. " + " ".join(row_in_words(rank, row) for rank, row in enumerate(timeline))
    )
    figure(draw_timeline(timeline, measured, end), alt, measured=measured)


@house_style
def draw_timeline(timeline: Timeline, measured: bool = False, end: float | None = None) -> Figure:
    """Draw the figure of `timeline`."""
    first = min(row[0].start for row in timeline)
    last = max(span.end for row in timeline for span in row)
    length = float(last - first) if end is None else float(end)
    if length < float(last - first):
        raise ValueError(f"end = {end} is before the end of the timeline, {float(last - first)}")
    length = length or 1.0
    ranks = len(timeline)
    row_height = min(ROW, 6.0 / ranks)
    step = -(-ranks // 16)
    labels = {rank: f"rank {rank}" for rank in range(0, ranks, step)}
    fig, ax = draw_rows(ranks, labels, length, row_height, measured)
    wide = length / (WIDTH - 0.7)  # about an inch, in units of time
    behind = any(action.kind in SHARDING for row in timeline for action, _, _ in row)
    for rank, row in enumerate(timeline):
        chunks = sorted({action.stage for action, _, _ in row})
        work = [span for span in row if span.action.kind not in SHARDING]
        starts = Counter(span.start for span in work if span.end > span.start)
        for place, (action, start, stop) in enumerate(work):
            part = WORK if behind else FULL
            if starts[start] == 2 and not behind:
                part = LOWER if place > 0 and work[place - 1].start == start else UPPER
            draw_box(
                ax,
                rank,
                KINDS[action.kind][1],
                action.microbatch if row_height > 0.15 else None,
                float(start - first),
                float(stop - start),
                wide,
                _fill(chunks.index(action.stage), len(chunks)),
                part,
            )
        for action, start, stop in sorted(row, key=lambda span: span.action.kind == "RESHARD"):
            if action.kind in SHARDING:
                fill, color = _fill(chunks.index(action.stage), len(chunks)), KINDS[action.kind][1]
                start, long = float(start - first), float(stop - start)
                if action.kind == "RESHARD":  # a stroke, over a gather that begins there
                    start, long = start - 0.015 * wide, 0.03 * wide
                draw_box(ax, rank, color, None, start, long, wide, fill, TRANSFER)
    kinds = [kind for kind in KINDS if any(a.kind == kind for row in timeline for a, _, _ in row)]
    keys = {KINDS[kind][0]: Rectangle((0, 0), 1, 1, color=KINDS[kind][1], lw=0) for kind in kinds}
    most = max(len({action.stage for action, _, _ in row}) for row in timeline)
    for chunk in range(most if most > 1 else 0):
        keys[f"chunk {chunk}"] = Rectangle(
            (0, 0), 1, 1, facecolor=to_rgba(FAINT, _fill(chunk, most)), edgecolor=FAINT, lw=0.8
        )
    draw_key(ax, keys)
    return fig


def _fill(chunk, chunks):
    """Return the opacity of the boxes of a rank's chunk: 1 for the first, then from 0.6 to 0.25.

    Between 0.6 and 1 no text colour is readable on a forward on both pages.
    """
    later = chunks - 1
    return 1.0 if chunk == 0 else 0.25 + 0.35 * (later - chunk) / max(1, later - 1)


def draw_rows(
    number: int, labels: Mapping[int, str], length: float, row_height: float, measured: bool
) -> tuple[Figure, Axes]:
    """Return a figure with an empty row for each thing that can be busy, on one axis of time.

    Args:
        number: the number of rows.
        labels: {row: its label}, for the rows that have one.
        length: the length of the axis, in units of time.
        row_height: in inches.
        measured: whether the unit is the second; otherwise time has no unit.
    """
    fig = Figure(figsize=(WIDTH, 0.85 + row_height * number), layout="constrained")
    ax = fig.add_subplot()
    ax.set(xlim=(0, length), ylim=(number, 0))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelcolor=INK, labelsize=9)
    ax.set_yticks([row + 0.5 for row in labels], map(literal, labels.values()))
    ax.xaxis.set_major_formatter(
        lambda value, _: _table.seconds(value) if measured and value else _table.number(value)
    )
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    for row in range(number):
        ax.plot([0, length], [row + 0.5] * 2, color=FAINT, linewidth=0.6, alpha=0.6, zorder=1)
    return fig, ax


def draw_box(
    ax: Axes,
    row: int,
    color: str,
    number: int | None,
    start: float,
    duration: float,
    wide: float,
    fill: float = 1,
    part: tuple[float, float] = FULL,
) -> None:
    """Draw a box, with its number where that fits.

    Args:
        ax: the axes.
        row: the box's row.
        color: of the box.
        number: the number to write in it, or None.
        start: where it begins, in units of time.
        duration: how long it is, in units of time.
        wide: about an inch, in units of time.
        fill: its opacity; below 1 it has a frame.
        part: the part of the row that it takes: (from where, how much of it).
    """
    gap = min(0.012 * wide, duration / 5)  # so that two boxes that touch look like two
    frame = {"linewidth": 0} if fill == 1 else {"linewidth": 0.7, "edgecolor": color}
    top, height = row + part[0], part[1]
    ax.add_patch(
        Rectangle(
            (start, top),
            duration - gap,
            height,
            facecolor=to_rgba(color, fill),
            zorder=2,
            **frame,
        )
    )
    if number is not None and len(str(number)) * DIGIT * wide < duration - gap:
        ax.text(
            start + (duration - gap) / 2,
            top + height / 2,
            str(number),
            color=text_on(color, fill),
            fontsize=9 if height > 0.5 else 7,
            weight="bold",
            ha="center",
            va="center_baseline",
            zorder=3,
        )


def draw_key(ax: Axes, keys: Mapping[str, Rectangle]) -> None:
    """Write above the rows what the boxes mean: {word: a box like them}."""
    few, rows = len(keys) < 5, 1 if sum(map(len, keys)) < 50 else 2  # 50 letters fill the width
    ax.legend(
        keys.values(),
        map(literal, keys),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        ncols=-(-len(keys) // rows),
        fontsize=9.5,
        labelcolor=INK,
        borderpad=0,
        borderaxespad=0.5,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.4 if few else 0.5,
        handletextpad=0.8 if few else 0.4,
    )


def row_in_words(rank, row):
    names = [str(action) for action, _, _ in row]
    listed = ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:3])} … {names[-1]}"
    return f"Rank {rank}: {listed}."
