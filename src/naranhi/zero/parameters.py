"""The parameters of ZeRO's units at stage 3: gathered in time, the next unit's ahead, and freed."""

import os

from naranhi.zero.prefetch import Prefetch


class Gathering:
    """Which units are gathered now, and which one is on its way.

    units: all of the model. stage: of ZeRO; below 3 every unit is whole at any time.
    tell: as in `zero.Zero`.
    """

    def __init__(self, units, stage, tell):
        self.units, self.sharded, self.tell = units, stage == 3, tell
        self.order = Prefetch()

    def need(self, unit, first=True, whole=False):
        """Have a unit's parameters here; if it begins, those of the next one on their way.

        whole: whether the model is whole for the time being (`whole.Whole`).
        """
        if self.sharded and unit.flats and not whole:  # the root may have none
            if not unit.held:
                self._start(unit)
            if first:
                following = self.order.after(unit)
                if following and not following.held:
                    self._start(following)
            if not unit.gathered:
                self._wait(unit)
        if first:
            self.tell("compute", unit.name)
            # The backend's threads may wait for a core, and other ranks for what they would send.
            _give_way()

    def free(self, unit):
        if self.sharded and unit.held:
            unit.free()
            self.tell("free", unit.name)

    def free_all(self):
        for unit in self.units:
            self.free(unit)

    def end_pass(self):
        """A forward alone, or a backward, is over."""
        self.order.end()
        self.free_all()

    def _start(self, unit):
        self.tell("gather", unit.name)
        unit.gather()

    def _wait(self, unit):
        try:
            unit.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"unit {unit.name} could not be gathered: do all ranks run the same "
                "units in the same order?"
            ) from error
        self.tell("gathered", unit.name)


_give_way = getattr(os, "sched_yield", lambda: None)  # which Windows lacks
