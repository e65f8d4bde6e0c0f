"""Reduce-scatter the gradients of ZeRO's units, one unit after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from naranhi.data_parallel.sync import have_gradients

if TYPE_CHECKING:
    import torch
    from torch import nn

    from naranhi.zero.flat_param import FlatParam
    from naranhi.zero.units import Unit


class Gradients:
    """Reductions in one order on all ranks, of which at most one is in flight.

    It is that of a unit whose backward is over, while the next unit computes.

    Args:
        units: All units of the model, the root last.
        names: {trained parameter: its name}.
        stage: As in `zero.Zero`.
        group: As in `zero.Zero`, and not None.
        on_event: As in `zero.Zero`, and not None.

    Attributes:
        seen: After the last reduction of a step, a row for each rank: which parameters have a
            gradient.
    """

    order: list[Unit]
    flats: list[FlatParam]
    names: Mapping[nn.Parameter, str]
    stage: int
    group: dist.ProcessGroup
    on_event: Callable[[str, str], object]
    seen: torch.Tensor | None

    def __init__(
        self,
        units: Sequence[Unit],
        names: Mapping[nn.Parameter, str],
        stage: int,
        group: dist.ProcessGroup,
        on_event: Callable[[str, str], object],
    ) -> None:
        self.order = [unit for unit in (*units[-2::-1], units[-1]) if unit.trained]
        self.flats = [flat for unit in units for flat in unit.trained]
        self.names, self.stage, self.group, self.on_event = names, stage, group, on_event
        self.seen = self._in_flight = None  # the latter: a unit and its Transfer
        self.reset()

    def reset(self) -> None:
        """Prepare for another backward."""
        self._started = 0  # how many of `order` in this backward

    def reduce(self, last: bool) -> None:
        """Reduce the gradients of units that are done.

        Args:
            last: Whether this is the last backward of the step.
        """
        while self._started < len(self.order) and self.order[self._started].done:
            unit = self.order[self._started]
            self._started += 1
            self.finish()
            unit.accumulate()
            self.on_event("reduce", unit.name)
            self._in_flight = unit, unit.reduce_scatter(*self._flags(last))

    def _flags(self, last):
        """Yield, beside a step's last reduction, the kernel that gathers who has which gradient."""
        if last and self._started == len(self.order):
            seen = {param for flat in self.flats for param in flat.seen}
            self.seen, kernel = have_gradients(
                [param in seen for param in self.names], self.group, self.flats[0].shard.device
            )
            yield kernel

    def advance(self) -> None:
        """Advance the reduction in flight while another unit computes.

        Once all but its last message have arrived, finish it, so that its flat gradients are freed
        before the other unit has all its gradients.
        """
        if self._in_flight:
            if self._in_flight[1].steps < dist.get_world_size(self.group) - 1:
                self._in_flight[1].advance()
            elif self.stage > 1:
                self.finish()

    def finish(self) -> None:
        """Wait for the reduction in flight."""
        if self._in_flight:
            unit, transfer = self._in_flight
            transfer.finish()
            unit.keep_reduced()
            self.on_event("reduced", unit.name)
            self._in_flight = None
