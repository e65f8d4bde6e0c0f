"""Draw several measures of the same things: bars for predictions, points for measurements.

The measures are side by side, each with one scale, so that a row shows what one choice gains and
what it costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from matplotlib.figure import Figure

from naranhi.show import _table
from naranhi.show._chart import WIDTH, style
from naranhi.show._colors import COLORS
from naranhi.show._figure import INK, house_style, literal

ROW = 0.29  # inches


@house_style
def panels(
    labels: Iterable[str],
    measures: Mapping[
        str, tuple[Sequence[float], Sequence[float] | None, Callable[[float], str] | None]
    ],
) -> Figure:
    """Draw a panel of horizontal bars for each measure, all with the same rows.

    Show the figure with `show.figure`.

    Args:
        labels: the names of the rows.
        measures: name -> (predicted, measured, write). `predicted` has a value of 0 or more per
            row, written beside its bar; `measured` is the same, or None if nothing was measured;
            `write` formats a value, or is None.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: there are no labels or no measures, the values do not match the labels in
            number, or a value cannot be a bar.
    """
    labels = list(labels)
    if not labels or not measures:
        raise ValueError(f"give at least one row and one measure, not {labels} and {[*measures]}")
    measures = {
        name: (_numbers(predicted), measured if measured is None else _numbers(measured), write)
        for name, (predicted, measured, write) in measures.items()
    }
    for name, (predicted, measured, _) in measures.items():
        for numbers in (predicted, measured):
            if numbers is not None and len(numbers) != len(labels):
                raise ValueError(f"{name}: {len(numbers)} numbers for {len(labels)} rows")
            if any(not math.isfinite(number) or number < 0 for number in numbers or ()):
                raise ValueError(f"{name}: bars are drawn from zero, and {numbers} does not fit")
    fig = Figure(figsize=(WIDTH, 0.6 + ROW * len(labels)), layout="constrained")
    columns = fig.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for ax, (name, (predicted, measured, write)), color in zip(
        columns, measures.items(), itertools.cycle(COLORS), strict=False
    ):
        _panel(ax, name, predicted, measured, write or _table.number, color)
    columns[0].set_yticks(range(len(labels)), map(literal, labels))
    columns[0].invert_yaxis()
    return fig


def _numbers(values):
    """Return a sequence, an array or a tensor as a list of Python's numbers."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _panel(ax, name, predicted, measured, write, color):
    style(ax)
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(axis="y", length=0, labelsize=9.5)
    ax.set_xticks([])
    ax.set_title(literal(name), loc="left", x=0, color=INK, fontsize=10, pad=6)
    places = range(len(predicted))
    ax.barh(places, predicted, height=0.62, color=color, alpha=0.55, linewidth=0)
    if measured is not None:
        ax.plot(measured, places, "o", color=INK, markersize=3.6, markeredgewidth=0, zorder=3)
    for place, value in enumerate(predicted):
        right = max(value, measured[place]) if measured is not None else value
        ax.annotate(
            write(value),
            (right, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    # Leave room for the text beside the longest bar.
    longest = max([*predicted, *(measured or ())]) or 1.0
    ax.set_xlim(0, 1.5 * longest)
