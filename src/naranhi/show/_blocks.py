"""Blocks side by side, as the pictures of collectives have them, and the canvas they lie on."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from naranhi.show import definitions
from naranhi.show._colors import COLORS
from naranhi.show._figure import FAINT, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAD = 0.05  # blocks, around each
ARROW = "-|>,head_length=5,head_width=2.6"
SLATE = "#4b5563"  # behind the name of a sum, which does not belong to a single rank


def canvas(width: float, height: float, unit: float) -> tuple[Figure, Axes]:
    """Make a figure without axis lines, measured in units; y counts down.

    Args:
        width: in units.
        height: in units.
        unit: inches.
    """
    fig = Figure(figsize=(width * unit, height * unit))
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return fig, ax


def draw_block(
    ax: Axes, x: float, y: float, held: definitions.Block | None, label: bool = True
) -> None:
    """Draw a block: a bar for each rank in it, side by side. None is an empty place."""
    if held is None:
        outline(ax, x, y, edgecolor=FAINT, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.6)
        return
    side, named_sum = 1 - 2 * PAD, label and len(held.terms) > 1
    if named_sum:
        _rounded(ax, x + PAD, y + PAD, side, side, SLATE)
    width, top = side / len(held.terms), y + PAD + (0.66 * side if named_sum else 0)
    for i, (_, rank) in enumerate(held.terms):
        _rounded(
            ax,
            x + PAD + i * width,
            top,
            width,
            y + 1 - PAD - top,
            COLORS[rank],
            left=i == 0,
            right=i == len(held.terms) - 1,
            upper=not named_sum,
        )
    if label:
        name = f"Σ{string.ascii_uppercase[held.terms[0][0]]}" if named_sum else str(held)
        ax.text(
            x + 0.5,
            y + (0.37 if named_sum else 0.5),
            name,
            color="white",
            weight="bold",
            fontsize=9.5,
            ha="center",
            va="center_baseline",
        )


def _rounded(ax, x, y, width, height, color, left=True, right=True, upper=True, radius=0.09):
    """Draw a filled box in which only the named corners are round."""
    right_x, below = x + width, y + height
    corners = [
        ((x, below), left),
        ((x, y), left and upper),
        ((right_x, y), right and upper),
        ((right_x, below), right),
    ]
    points, codes = [], []
    for i, (corner, is_round) in enumerate(corners):
        for neighbour in (corners[i - 1][0], None, corners[(i + 1) % 4][0]):
            if neighbour is None:
                points.append(corner)
            elif is_round:
                distance = abs(neighbour[0] - corner[0]) + abs(neighbour[1] - corner[1])
                points.append(
                    tuple(
                        c + (n - c) * radius / distance
                        for c, n in zip(corner, neighbour, strict=True)
                    )
                )
        codes += [Path.LINETO, Path.CURVE3, Path.CURVE3] if is_round else [Path.LINETO]
    codes[0] = Path.MOVETO
    ax.add_patch(
        PathPatch(
            Path([*points, points[0]], [*codes, Path.CLOSEPOLY]),
            facecolor=color,
            edgecolor="none",
            clip_on=False,
        )
    )


def outline(ax: Axes, x: float, y: float, **style: Any) -> None:
    """Draw a frame around the place of a block; `style` is what matplotlib's patches take."""
    ax.add_patch(
        FancyBboxPatch(
            (x + PAD, y + PAD),
            1 - 2 * PAD,
            1 - 2 * PAD,
            fill=False,
            clip_on=False,
            boxstyle="round,pad=0,rounding_size=0.09",
            **style,
        )
    )


def rank_names(ax: Axes, ranks: int, top: float, size: float = 9.5) -> None:
    """Write the ranks' names at the left, one per unit, from `top` down; `size` is in points."""
    for rank in range(ranks):
        ax.text(
            0.0, top + rank + 0.5, f"rank {rank}", color=INK, fontsize=size, va="center_baseline"
        )


def block_names(ax: Axes, blocks: int, x: float, top: float) -> None:
    """Write the blocks' letters above their columns, from `x` to the right."""
    for at in range(blocks):
        ax.text(
            x + at + 0.5,
            top - 0.2,
            string.ascii_uppercase[at],
            color=INK,
            fontsize=8.5,
            ha="center",
        )
