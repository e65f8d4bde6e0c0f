"""Draw pictures of the collectives, computed by running their definitions on named blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import FancyArrowPatch, PathPatch
from matplotlib.path import Path

from naranhi.show import definitions
from naranhi.show._blocks import (
    ARROW,
    PAD,
    block_names,
    canvas,
    draw_block,
    outline,
    rank_names,
)
from naranhi.show._colors import COLORS
from naranhi.show._figure import FAINT, INK, figure, house_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def collective(name: str, ranks: int = 4, root: int = 0) -> None:
    """Show what each rank holds before and after a collective.

    A row is a rank, a column a position, and a colour the rank that the data came from. A sum has
    one bar for each rank that is in it.

    Args:
        name: "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter",
            "all_reduce" or "all_to_all".
        ranks: the number of ranks, at most 4.
        root: the rank where a broadcast or scatter starts, or a gather or reduce ends.

    Raises:
        ValueError: another name, more than 4 ranks, or a root that is not one of the ranks.
    """
    before, after = _states(name, ranks, root)
    alt = f"{name} on {ranks} ranks. Before: {_words(before)}. After: {_words(after)}."
    figure(draw_collective(name, ranks, root), alt)


def ring_steps(ranks: int = 4) -> None:
    """Show every step of a ring all-reduce: first the reduce-scatter, then the all-gather.

    A column is a block. A frame marks the block that a rank has just received from the rank above
    it (rank 0 from the last).

    Args:
        ranks: the number of ranks, at most 4.

    Raises:
        ValueError: more than 4 ranks.
    """
    steps = definitions.ring(definitions.example("all_reduce", _coloured(ranks)))
    figure(
        draw_ring(ranks),
        f"The {len(steps) - 1} steps of a ring all-reduce on {ranks} ranks. "
        f"After the reduce-scatter: {_words(steps[ranks - 1].held)}. "
        f"After the all-gather: {_words(steps[-1].held)}.",
    )


def tree(ranks: int = 4, root: int = 0) -> None:
    """Show the rounds of a broadcast along a binomial tree, from the root.

    Args:
        ranks: the number of ranks.
        root: the rank where the broadcast starts.

    Raises:
        ValueError: the root is not one of the ranks.
    """
    _is_rank(root, ranks)
    rounds = definitions.tree(ranks, root)
    words = "; ".join(
        f"round {i}: " + ", ".join(f"{a} to {b}" for a, b in pairs)
        for i, pairs in enumerate(rounds, 1)
    )
    figure(
        draw_tree(ranks, root),
        f"A broadcast from rank {root} to {ranks} ranks along a "
        f"binomial tree, in {len(rounds)} rounds. {words}.",
    )


UNIT = 0.43  # inches, the width of a block in the pictures of single collectives
LABELS = 1.35  # blocks, the width of the ranks' names at the left
BETWEEN = 1.3  # blocks, between before and after


@house_style
def draw_collective(name: str, ranks: int, root: int = 0) -> Figure:
    """Draw the figure of `collective`."""
    before, after = _states(name, ranks, root)
    # A panel is as wide as the largest number of blocks that a rank holds.
    widths = [max(map(len, state)) for state in (before, after)]
    top, middle = 0.62, LABELS + widths[0]
    fig, ax = canvas(middle + BETWEEN + widths[1], ranks + top, UNIT)
    for x, width, state, title in (
        (LABELS, widths[0], before, "before"),
        (middle + BETWEEN, widths[1], after, "after"),
    ):
        ax.text(x + PAD, 0.3, title, color=INK, fontsize=9.5, va="center_baseline")
        for rank, blocks in enumerate(state):
            for at in range(width):
                draw_block(ax, x + at, top + rank, blocks[at] if at < len(blocks) else None)
    rank_names(ax, ranks, top)
    y = top + ranks / 2
    ax.add_patch(
        FancyArrowPatch(
            (middle + 0.25, y),
            (middle + BETWEEN - 0.25, y),
            arrowstyle=ARROW,
            color=FAINT,
            linewidth=1.6,
            shrinkA=0,
            shrinkB=0,
        )
    )
    return fig


@house_style
def draw_ring(ranks: int) -> Figure:
    """Draw the figure of `ring_steps`."""
    steps = definitions.ring(definitions.example("all_reduce", _coloured(ranks)))
    gap, top, labels = 1.15, 2.1, 2.2
    row_height = top + ranks + 0.35
    # The first row shows the start and the reduce-scatter, the second the all-gather.
    rows = [steps[:ranks], steps[ranks:]] if ranks > 1 else [steps]
    fig, ax = canvas(labels + ranks * (ranks + gap) - gap, row_height * len(rows), 0.26)
    for row, (phase, row_steps) in enumerate(
        zip(("reduce-scatter", "all-gather"), rows, strict=False)
    ):
        y = row * row_height + top
        first = ranks - len(row_steps)
        ax.text(
            labels + first * (ranks + gap) + PAD,
            y - 1.65,
            phase,
            color=INK,
            fontsize=9.5,
            weight="bold",
        )
        rank_names(ax, ranks, y, size=8.5)
        for column, step in enumerate(row_steps, first):
            x = labels + column * (ranks + gap)
            number = row * ranks + column - first
            ax.text(
                x + PAD, y - 0.85, f"step {number}" if number else "start", color=INK, fontsize=8.5
            )
            block_names(ax, ranks, x, y)
            draw_steps(ax, x, y, step)
            draw_messages(ax, x, y, gap, step)
    if ranks > 2:
        y = row_height + top + ranks / 2
        outline(ax, labels, y - 0.5, edgecolor=INK, linewidth=1.6)
        ax.text(
            labels + 1.25,
            y,
            "has just\narrived",
            color=INK,
            fontsize=8.5,
            va="center_baseline",
            linespacing=1.3,
        )
    return fig


def draw_steps(ax: Axes, x: float, y: float, step: definitions.Step) -> None:
    """Draw one step of the ring: a row of blocks per rank, and a frame around what has arrived."""
    for rank, blocks in enumerate(step.held):
        for at, held in enumerate(blocks):
            draw_block(ax, x + at, y + rank, held, label=False)
    for rank, at in enumerate(step.received):
        if at is not None:
            outline(ax, x + at, y + rank, edgecolor=INK, linewidth=1.6)


def draw_messages(ax: Axes, x: float, y: float, gap: float, step: definitions.Step) -> None:
    """Draw a step's messages, in their senders' colours, in the gap left of the step's blocks."""
    ranks = len(step.held)
    left, middle, right = x - gap + 0.1, x - gap / 2, x - 0.1
    for rank, at in enumerate(step.received):
        if at is not None:
            sender = (rank - 1) % ranks
            start, end = y + sender + 0.5, y + rank + 0.5
            ax.add_patch(
                PathPatch(
                    Path(
                        [(left, start), (middle, start), (middle, end), (right, end)],
                        [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4],
                    ),
                    fill=False,
                    edgecolor=COLORS[sender],
                    linewidth=1.4,
                    capstyle="round",
                    clip_on=False,
                )
            )


@house_style
def draw_tree(ranks: int, root: int = 0) -> Figure:
    """Draw the figure of `tree`."""
    rounds = definitions.tree(ranks, root)
    across, down, left, top = 2.2, 0.82, LABELS + 0.25, 0.95
    fig, ax = canvas(left + across * len(rounds) + 0.9, top + down * ranks - 0.3, UNIT)
    since = {root: 0} | {receiver: i for i, pairs in enumerate(rounds, 1) for _, receiver in pairs}
    end = left + across * len(rounds) + 0.6
    for rank in range(ranks):
        y, start = top + down * rank, left + across * since[rank]
        ax.text(0, y, f"rank {rank}", color=INK, fontsize=9.5, va="center_baseline")
        ax.plot([left, start], [y, y], color=FAINT, linewidth=1, dashes=(1, 3), alpha=0.7)
        ax.plot([start, end], [y, y], color=COLORS[0], linewidth=2.4, solid_capstyle="round")
        ax.plot([start], [y], "o", color=COLORS[0], markersize=8, markeredgewidth=0)
    for i, pairs in enumerate(rounds):
        x = left + across * i
        ax.text(
            x + across / 2,
            0.3,
            f"round {i + 1}",
            color=INK,
            fontsize=9.5,
            ha="center",
            va="center_baseline",
        )
        for sender, receiver in pairs:
            ax.add_patch(
                FancyArrowPatch(
                    (x, top + down * sender),
                    (x + across, top + down * receiver),
                    arrowstyle=ARROW,
                    color=COLORS[0],
                    linewidth=1.4,
                    shrinkA=0,
                    shrinkB=6,
                )
            )
    return fig


def _states(name, ranks, root):
    if name not in definitions.COLLECTIVES:
        raise ValueError(
            f"a collective is one of {', '.join(definitions.COLLECTIVES)}, not {name!r}"
        )
    _is_rank(root, _coloured(ranks))
    before = definitions.example(name, ranks, root)
    rooted = name in ("broadcast", "scatter", "gather", "reduce")
    return before, definitions.COLLECTIVES[name](before, **({"root": root} if rooted else {}))


def _coloured(ranks):
    if ranks not in range(1, len(COLORS) + 1):
        raise ValueError(f"there are colours for 1 to {len(COLORS)} ranks, not {ranks!r}")
    return ranks


def _is_rank(root, ranks):
    if root not in range(ranks):
        raise ValueError(f"root is a rank from 0 to {ranks - 1}, not {root!r}")


def _words(state):
    return "; ".join(
        f"rank {rank} holds " + (", ".join(map(str, blocks)) or "nothing")
        for rank, blocks in enumerate(state)
    )
