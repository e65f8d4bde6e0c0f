"""Draw small matrices side by side, with their values written out, to be followed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle

from naranhi.show._blocks import canvas
from naranhi.show._colors import COLORS
from naranhi.show._figure import FAINT, INK, figure, house_style, literal
from naranhi.show._table import number

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

UNIT = 0.36  # inches, the side of a cell
GAP = 1.1  # cells, between two matrices
TOP = 0.9  # cells, for the titles
PAD = 0.05  # cells, around everything, or the outermost lines would be cut in half
WHITE = "#ffffff"


def grids(
    matrices: Mapping[
        str, tuple[Sequence[Sequence[float]] | torch.Tensor, Sequence[Sequence[int]] | torch.Tensor]
    ],
    alt: str,
) -> None:
    """Show matrices side by side.

    Args:
        matrices: title -> (values, marks). Values are rows of elements, or a tensor of two
            dimensions. Marks have the same shape: for each cell the index of one of the book's
            colours, or a negative number for none.
        alt: a sentence that says what the picture shows.

    Raises:
        ValueError: there are no matrices, one is empty or is not a matrix, marks and values differ
            in shape, or a mark is of no colour.
    """
    figure(draw_grids(matrices), alt)


@house_style
def draw_grids(
    matrices: Mapping[
        str, tuple[Sequence[Sequence[float]] | torch.Tensor, Sequence[Sequence[int]] | torch.Tensor]
    ],
) -> Figure:
    """Draw the figure of `grids`."""
    matrices = {title: (_rows(values), _rows(marks)) for title, (values, marks) in matrices.items()}
    for title, (values, marks) in matrices.items():
        if list(map(len, values)) != list(map(len, marks)):
            raise ValueError(f"{title}: values and marks differ in shape")
        if not any(values):
            raise ValueError(f"{title}: there are no values to draw")
        most = max(map(max, filter(None, marks)))
        if most >= len(COLORS):
            raise ValueError(f"{title}: a mark is one of {len(COLORS)} colours, from 0, not {most}")
    if not matrices:
        raise ValueError("name at least one matrix to draw")
    widths = [max(map(len, values)) for values, _ in matrices.values()]
    height = max(len(values) for values, _ in matrices.values())
    width = sum(widths) + GAP * (len(widths) - 1)
    fig, ax = canvas(width + 2 * PAD, TOP + height + PAD, UNIT)
    x = PAD
    for (title, (values, marks)), width in zip(matrices.items(), widths, strict=True):
        ax.text(x, TOP - 0.4, literal(title), color=INK, fontsize=9.5, va="center_baseline")
        for y, (row, marked) in enumerate(zip(values, marks, strict=True)):
            for at, (value, mark) in enumerate(zip(row, marked, strict=True)):
                _draw_cell(ax, x + at, TOP + y, value, mark)
        x += width + GAP
    return fig


def _draw_cell(ax, x, y, value, mark):
    if mark >= 0:
        ax.add_patch(Rectangle((x, y), 1, 1, facecolor=COLORS[mark], edgecolor="none"))
    ax.add_patch(Rectangle((x, y), 1, 1, facecolor="none", edgecolor=FAINT, linewidth=0.8))
    # `float` of a float32 shows spurious digits: 0.8 would be 0.800000011920929.
    ax.text(
        x + 0.5,
        y + 0.5,
        number(value),
        color=WHITE if mark >= 0 else INK,
        fontsize=9.5,
        ha="center",
        va="center_baseline",
    )


def _rows(matrix):
    try:
        rows = matrix.tolist() if hasattr(matrix, "tolist") else matrix
        return [list(row) for row in rows]
    except TypeError:
        raise ValueError(f"a matrix is rows of elements, not {matrix!r}") from None
