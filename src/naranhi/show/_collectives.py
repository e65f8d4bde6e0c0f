"""Pictures of the collectives, computed by running their definitions on named blocks."""

import string

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from naranhi.show import definitions
from naranhi.show._chart import COLORS
from naranhi.show._figure import FAINT, INK, figure


def collective(name, ranks=4, root=0):
    """Show what each rank holds before and after a collective.

    A row is a rank, a column a position, and a colour the rank that the data came from: a sum has
    a bar of each rank that is in it.
    name: "broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce"
    or "all_to_all". root: the rank that a broadcast or scatter starts from, or a gather or reduce
    ends at.
    Raises ValueError for another name, more than 4 ranks or a root that is none of them.
    """
    before, after = _states(name, ranks, root)
    alt = f"{name} on {ranks} ranks. Before: {_words(before)}. After: {_words(after)}."
    figure(draw_collective(name, ranks, root), alt)


def ring_steps(ranks=4):
    """Show every step of a ring all-reduce: first the reduce-scatter, then the all-gather.

    What a rank has just received from the rank above it (the first from the last) is framed.
    """
    steps = definitions.ring(definitions.example("all_reduce", _coloured(ranks)))
    figure(draw_ring(ranks), f"The {len(steps) - 1} steps of a ring all-reduce on {ranks} ranks. "
           f"After the reduce-scatter: {_words(steps[ranks - 1].held)}. "
           f"After the all-gather: {_words(steps[-1].held)}.")


def tree(ranks=4, root=0):
    """Show the rounds of a broadcast along a binomial tree."""
    rounds = definitions.tree(ranks, root)
    words = "; ".join(f"round {i}: " + ", ".join(f"{a} to {b}" for a, b in pairs)
                      for i, pairs in enumerate(rounds, 1))
    figure(draw_tree(ranks, root), f"A broadcast from rank {root} to {ranks} ranks along a "
           f"binomial tree, in {len(rounds)} rounds. {words}.")


UNIT = 0.43  # inches, the width of a block in the pictures of single collectives
LABELS = 1.35  # blocks, the width of the ranks' names at the left
BETWEEN = 1.3  # blocks, between before and after


def draw_collective(name, ranks, root=0):
    before, after = _states(name, ranks, root)
    # A panel is as wide as the most that a rank holds.
    widths = [max(map(len, state)) for state in (before, after)]
    fig, ax = _canvas(LABELS + widths[0] + BETWEEN + widths[1], ranks + 0.62, UNIT)
    middle = LABELS + widths[0]
    for x, width, state, title in ((LABELS, widths[0], before, "before"),
                                   (middle + BETWEEN, widths[1], after, "after")):
        ax.text(x + 0.06, 0.3, title, color=INK, fontsize=9.5, va="center")
        for rank, blocks in enumerate(state):
            for at in range(width):
                held = blocks[at] if at < len(blocks) else None
                _block(ax, x + at, 0.62 + rank, held)
    _rank_names(ax, ranks, 0.62)
    ax.add_patch(FancyArrowPatch(
        (middle + 0.25, 0.62 + ranks / 2), (middle + BETWEEN - 0.25, 0.62 + ranks / 2),
        arrowstyle="-|>,head_length=5,head_width=2.6", color=FAINT, linewidth=1.6, shrinkA=0,
        shrinkB=0))
    return fig


def draw_ring(ranks):
    steps = definitions.ring(definitions.example("all_reduce", _coloured(ranks)))
    unit, gap, top, labels = 0.265, 0.75, 1.55, 2.1
    per_row = max(2, ranks)  # the start and the steps of the reduce-scatter; below, the all-gather
    height = (ranks + top) * 2 if ranks > 1 else ranks + top
    fig, ax = _canvas(labels + per_row * (ranks + gap) - gap, height, unit)
    for i, step in enumerate(steps):
        row, column = (0, i) if i < ranks else (1, i - ranks + 1)
        x, y = labels + column * (ranks + gap), row * (ranks + top) + top
        title = "start" if i == 0 else f"step {i}"
        ax.text(x + 0.04, y - 0.28, title, color=INK, fontsize=8.5, va="baseline")
        for rank, blocks in enumerate(step.held):
            for at, held in enumerate(blocks):
                _block(ax, x + at, y + rank, held, label=False,
                       framed=step.received[rank] == at)
        if column == 0 or (row == 1 and column == 1):
            phase = "reduce-scatter" if row == 0 else "all-gather"
            ax.text(x + 0.04, y - 1.1, phase, color=INK, fontsize=9.5, va="baseline",
                    weight="bold")
    for row in range(2 if ranks > 1 else 1):
        _rank_names(ax, ranks, row * (ranks + top) + top, size=8.5)
    return fig


def draw_tree(ranks, root=0):
    rounds = definitions.tree(ranks, root)
    fig, ax = _canvas(LABELS + 1.7 * len(rounds) + 0.8, ranks * 0.8 + 0.7, 0.43)
    def place(rank):
        return 0.95 + 0.8 * rank
    has = {root: 0}
    for i, pairs in enumerate(rounds, 1):
        has.update((receiver, i) for _, receiver in pairs)
    for rank in range(ranks):
        y, start = place(rank), LABELS + 0.3 + 1.7 * has[rank]
        end = LABELS + 0.3 + 1.7 * len(rounds)
        ax.plot([LABELS + 0.3, start], [y, y], color=FAINT, linewidth=1, dashes=(1, 3), alpha=0.7)
        ax.plot([start, end], [y, y], color=COLORS[0], linewidth=2.2, solid_capstyle="round")
        ax.plot([start], [y], "o", color=COLORS[0], markersize=8, markeredgewidth=0)
        ax.text(LABELS - 0.15, y, f"rank {rank}", color=INK, fontsize=9.5, ha="right",
                va="center")
    for i, pairs in enumerate(rounds, 1):
        x = LABELS + 0.3 + 1.7 * i
        ax.text(x - 0.85, 0.3, f"round {i}", color=INK, fontsize=9.5, ha="center", va="center")
        for a, b in pairs:
            ax.add_patch(FancyArrowPatch(
                (x - 1.7, place(a)), (x, place(b)), arrowstyle="-|>,head_length=5,head_width=2.6",
                color=COLORS[0], linewidth=1.4, shrinkA=5, shrinkB=6))
    return fig


def _canvas(width, height, unit):
    """A figure without axes, in units of a block; y counts down."""
    fig = Figure(figsize=(width * unit, height * unit))
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return fig, ax


def _rank_names(ax, ranks, top, size=9.5):
    for rank in range(ranks):
        ax.text(0.0, top + rank + 0.5, f"rank {rank}", color=INK, fontsize=size,
                va="center_baseline")


def _block(ax, x, y, held, label=True, framed=False):
    """A block: a bar of each rank in it, side by side; None is a place where nothing is."""
    pad = 0.06
    side = 1 - 2 * pad
    if held is None:
        ax.add_patch(Rectangle((x + pad, y + pad), side, side, fill=False, edgecolor=FAINT,
                               linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.6))
        return
    width = side / len(held.terms)
    for i, (_, rank) in enumerate(held.terms):
        ax.add_patch(Rectangle((x + pad + i * width, y + pad), width, side, color=COLORS[rank],
                               linewidth=0))
    if framed:
        ax.add_patch(Rectangle((x + pad, y + pad), side, side, fill=False, edgecolor=INK,
                               linewidth=1.4))
    if label:
        letter = string.ascii_uppercase[held.terms[0][0]]
        text = str(held) if len(held.terms) == 1 else f"Σ{letter}"
        ax.text(x + 0.5, y + 0.5, text, color="white", weight="bold", fontsize=9.5, ha="center",
                va="center_baseline")


def _states(name, ranks, root):
    if name not in definitions.COLLECTIVES:
        raise ValueError(f"a collective is one of {', '.join(definitions.COLLECTIVES)}, "
                         f"not {name!r}")
    if root not in range(_coloured(ranks)):
        raise ValueError(f"root is a rank, 0 to {ranks - 1}, not {root!r}")
    before = definitions.example(name, ranks, root)
    rooted = name in ("broadcast", "scatter", "gather", "reduce")
    return before, definitions.COLLECTIVES[name](before, **({"root": root} if rooted else {}))


def _coloured(ranks):
    if ranks not in range(1, len(COLORS) + 1):
        raise ValueError(f"there are colours for 1 to {len(COLORS)} ranks, not {ranks!r}")
    return ranks


def _words(state):
    return "; ".join(f"rank {rank} holds " + (", ".join(map(str, blocks)) or "nothing")
                     for rank, blocks in enumerate(state))
