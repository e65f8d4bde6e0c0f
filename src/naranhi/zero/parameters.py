"""All-gather, prefetch and free the parameters of ZeRO's units at stage 3."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from naranhi.zero.phase import ParamState
from naranhi.zero.prefetch import Prefetch

if TYPE_CHECKING:
    from naranhi.zero.units import Unit


class Parameters:
    """Which units are gathered now, and which unit's all-gather is in flight.

    Args:
        units: All units of the model.
        stage: The stage of ZeRO; below 3 every unit is whole at any time.
        on_event: As in `zero.Zero`, and not None.
    """

    units: Sequence[Unit]
    sharded: bool
    on_event: Callable[[str, str], object]
    order: Prefetch

    def __init__(
        self, units: Sequence[Unit], stage: int, on_event: Callable[[str, str], object]
    ) -> None:
        self.units, self.sharded, self.on_event = units, stage == 3, on_event
        self.order = Prefetch()

    def unshard(self, unit: Unit, first: bool = True, whole: bool | str | None = False) -> None:
        """Gather a unit's parameters, and start the next unit's all-gather.

        Args:
            unit: The unit that computes now.
            first: Whether it begins to compute; otherwise nothing is prefetched.
            whole: Whether the model is whole for the time being (`whole.Whole`).
        """
        if self.sharded and unit.flats and not whole:  # the root may have none
            if unit.state is ParamState.SHARDED:
                self.start(unit)
            if first:
                following = self.order.after(unit)
                if following and following.state is ParamState.SHARDED:
                    self.start(following)
            if unit.state is not ParamState.UNSHARDED:
                self.wait(unit)
        if first:
            self.on_event("compute", unit.name)
            # Yield: the backend's threads may need this core to send what other ranks wait for.
            _give_way()

    def reshard(self, unit: Unit) -> None:
        """Free a unit's parameters, if they are gathered or their all-gather is in flight."""
        if self.sharded and unit.state is not ParamState.SHARDED:
            unit.reshard()
            self.on_event("free", unit.name)

    def reshard_all(self) -> None:
        """Free all units."""
        for unit in self.units:
            self.reshard(unit)

    def end_pass(self) -> None:
        """End a forward without a backward, or a backward."""
        self.order.end()
        self.reshard_all()

    def start(self, unit: Unit) -> None:
        """Start a unit's all-gather."""
        self.on_event("gather", unit.name)
        unit.unshard()

    def wait(self, unit: Unit) -> None:
        """Wait for a unit's all-gather."""
        try:
            unit.wait_for_unshard()
        except RuntimeError as error:
            raise RuntimeError(
                f"unit {unit.name} could not be gathered: do all ranks run the same "
                "units in the same order?"
            ) from error
        self.on_event("gathered", unit.name)


_give_way = getattr(os, "sched_yield", lambda: None)  # Windows has no sched_yield
