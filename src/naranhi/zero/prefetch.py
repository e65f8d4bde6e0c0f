"""Predict the next unit from the previous pass, so that it is gathered in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from naranhi.zero.units import Unit


class Prefetch:
    """The orders in which units are needed: in passes with a backward, and in forwards alone.

    Attributes:
        recording: Whether the pass in progress is one with a backward.
    """

    recording: bool

    def __init__(self):
        self._orders = {True: [], False: []}
        self.begin(True)

    def begin(self, recording: bool) -> None:
        """Begin a pass.

        Args:
            recording: Whether autograd records it: a backward will follow.
        """
        self.recording, self._trace = recording, []

    def end(self) -> None:
        """Remember the order of the pass that ends here."""
        self._orders[self.recording], self._trace = self._trace, []

    def after(self, unit: Unit) -> Unit | None:
        """Return the unit that followed in the last pass, if this pass is like it so far, or None.

        Args:
            unit: The unit that is needed now.
        """
        self._trace.append(unit)
        order, place = self._orders[self.recording], len(self._trace)
        return order[place] if place < len(order) and order[:place] == self._trace else None
