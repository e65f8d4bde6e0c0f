"""Draw the states that something went through, and the events that led from each to the next."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from naranhi.show._blocks import canvas
from naranhi.show._chart import WIDTH
from naranhi.show._colors import COLORS
from naranhi.show._figure import FAINT, INK, figure, house_style, literal

BOX = 1.5, 0.34  # inches: the width and the height of a state
PITCH = 0.8  # inches from a state to the one below it
LEFT = 1.9  # inches on the left of the states, for the way back


def states(first: str, changes: Sequence[tuple[str, str]], alt: str) -> None:
    """Show the states of one round, from top to bottom, with the events that change them.

    Args:
        first: the name of the state that the round begins in.
        changes: (event, state after it), in order. Events that leave the state as it is are
            written beside the state. The last event may lead back to `first`.
        alt: a sentence that says what the picture shows.

    Raises:
        ValueError: a state other than `first` is returned to, or a change follows the way back.
    """
    figure(draw_states(first, changes), alt)


@house_style
def draw_states(first: str, changes: Sequence[tuple[str, str]]) -> Figure:
    """Draw the figure of `states`."""
    first, changes = literal(first), [(literal(event), literal(to)) for event, to in changes]
    order = list(dict.fromkeys([first, *(state for _, state in changes)]))
    fig, ax = canvas(WIDTH, PITCH * (len(order) - 1) + BOX[1] + 0.1, 1.0)
    middle = LEFT + BOX[0] / 2
    for place, state in enumerate(order):
        y = 0.05 + PITCH * place
        color = COLORS[place % len(COLORS)]
        ax.add_patch(
            FancyBboxPatch(
                (LEFT, y),
                *BOX,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor=color,
                linewidth=0,
            )
        )
        ax.text(middle, y + BOX[1] / 2, state, color="white", fontsize=9, ha="center", va="center")
    arrow = {"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    before, beside = first, {}
    for event, state in changes:
        y = 0.05 + PITCH * order.index(before)
        if state == before and before in beside:
            beside[before].set_text(f"{beside[before].get_text()}\n{event}")
        elif state == before:
            place = LEFT + BOX[0] + 0.15, y + BOX[1] / 2
            beside[before] = ax.text(*place, event, color=INK, fontsize=9, va="center")
        elif before == first and ax.lines:  # the way back is drawn
            raise ValueError(f"{event!r} comes after the way back to {first}; show one round")
        elif order.index(state) == order.index(before) + 1:
            ends = {"xy": (middle, y + PITCH), "xytext": (middle, y + BOX[1])}
            ax.annotate("", **ends, arrowprops=arrow)
            y += (PITCH + BOX[1]) / 2
            ax.text(middle + 0.15, y, event, color=INK, fontsize=9, va="center")
        elif state == first:
            top, bottom = 0.05 + BOX[1] / 2, y + BOX[1] / 2
            side = LEFT - 0.35
            ax.plot([LEFT, side, side], [bottom, bottom, top], color=FAINT, linewidth=1.2)
            ax.annotate("", xy=(LEFT, top), xytext=(side, top), arrowprops=arrow)
            y = (top + bottom) / 2
            ax.text(side - 0.12, y, event, color=INK, fontsize=9, ha="right", va="center")
        else:
            raise ValueError(f"{event!r} leads back to {state}, which is not where it began")
        before = state
    return fig
