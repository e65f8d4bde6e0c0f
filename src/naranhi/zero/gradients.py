"""Reduce-scatter the gradients of ZeRO's units, one unit after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from naranhi.collectives import chunks, ring
from naranhi.data_parallel.sync import have_gradients
from naranhi.distributed.agreement import from_all_ranks, groups_of
from naranhi.zero.units import Transfer, Unit

if TYPE_CHECKING:
    import torch
    from torch import nn

    from naranhi.distributed.agreement import Axes
    from naranhi.zero.flat_param import FlatParam


class Gradients:
    """Reductions in one order on all ranks, of which at most one is in flight.

    A unit whose backward is over is reduced while the next unit computes. In the first step the
    order is that of registration, from the last unit to the first. From then on it is the order in
    which the backward of rank 0 ended its units in the first step: otherwise a head registered
    before the blocks would keep the gradients of all blocks waiting. With replicas, in the last
    backward a unit's reduction has a second part: while the next unit's gradients are reduced, this
    rank's shard is summed over the ranks that hold the same shard.

    Args:
        units: All units of the model, the root last.
        names: {trained parameter: its name}.
        stage: As in `zero.Zero`.
        axes: `group` of `zero.Zero`, and `replicas` if there are any.
        on_event: As in `zero.Zero`, and not None.

    Attributes:
        seen: After the last reduction of a step, a row for each rank: which parameters have a
            gradient.
    """

    order: list[Unit]
    flats: list[FlatParam]
    names: Mapping[nn.Parameter, str]
    stage: int
    axes: Axes
    on_event: Callable[[str, str], object]
    seen: torch.Tensor | None

    def __init__(
        self,
        units: Sequence[Unit],
        names: Mapping[nn.Parameter, str],
        stage: int,
        axes: Axes,
        on_event: Callable[[str, str], object],
    ) -> None:
        self.order = [unit for unit in (*units[-2::-1], units[-1]) if unit.trained]
        self.flats = [flat for unit in units for flat in unit.trained]
        self.names, self.stage, self.axes, self.on_event = names, stage, axes, on_event
        self._far = groups_of(axes)[1:]
        self.seen = None
        self._in_flight = None  # a unit, its Transfer, whether in the step's last backward
        self._summing = None  # a unit, and the Transfer that sums its shard over the replicas
        self._started = 0  # how many of `order` in this backward
        self._ended: list[int] | None = []  # places in `order`, as units end; None after a step

    def reduce(self, last: bool) -> None:
        """Reduce the gradients of units that are done.

        Args:
            last: Whether this is the last backward of the step.
        """
        if self._ended is not None:
            ended = (place for place, unit in enumerate(self.order) if unit.done)
            self._ended += [place for place in ended if place not in self._ended]
        while self._started < len(self.order) and self.order[self._started].done:
            unit = self.order[self._started]
            self._started += 1
            self.start(unit, last)

    def adopt_order(self) -> None:
        """After the first step, adopt the order in which rank 0's backward ended its units."""
        if self._ended is not None:
            first, self._ended = from_all_ranks(self._ended, self.axes)[0], None
            rest = [place for place in range(len(self.order)) if place not in first]
            self.order = [self.order[place] for place in (*first, *rest)]

    def start(self, unit: Unit, last: bool = False) -> None:
        """Start to reduce a unit's gradients, once the reduction in flight is over.

        Args:
            unit: A unit with gradients.
            last: As for `reduce`.
        """
        self.finish()
        unit.accumulate()
        self.on_event("reduce", unit.name)
        self._in_flight = unit, unit.reduce_scatter(*self._flags(last)), last

    def _flags(self, last):
        """Yield, beside a step's last reduction, the kernel that gathers who has which gradient."""
        if last and self._started == len(self.order):
            seen = {param for flat in self.flats for param in flat.seen}
            self.seen, kernel = have_gradients(
                [param in seen for param in self.names], self.axes, self.flats[0].shard.device
            )
            yield kernel

    def advance(self, early: bool = True) -> None:
        """Advance the reduction in flight while another unit computes.

        Args:
            early: Whether to finish it once all but its last message have arrived, so that its flat
                gradients are freed before the computing unit has all its gradients.
        """
        if self._summing:
            self._summing[1].advance()
        if self._in_flight:
            unit, transfer, _ = self._in_flight
            if transfer.steps < max(flat.ranks for flat in unit.trained) - 1:
                transfer.advance()
            elif early and self.stage > 1:
                self.finish()

    def finish(self) -> None:
        """Wait for the reduction in flight; in the last backward, start its sum over replicas."""
        if self._in_flight:
            unit, transfer, last = self._in_flight
            transfer.finish()
            unit.keep_reduced()
            self.on_event("reduced", unit.name)
            self._in_flight = None
            if last and self._far:
                self._finish_sum()
                self.on_event("sum", unit.name)
                self._summing = unit, Transfer(_sums(unit))

    def finish_all(self) -> None:
        """Wait for the reduction in flight and its sum over replicas; prepare the next backward."""
        self.finish()
        self._finish_sum()
        self._started = 0

    def _finish_sum(self):
        if self._summing:
            unit, transfer = self._summing
            transfer.finish()
            self.on_event("summed", unit.name)
            self._summing = None


def _sums(unit):
    """Yield kernels that sum this rank's shards of a unit's gradients over the replicas."""
    for flat in unit.trained:
        for axis in flat.axes[1:]:
            rank, ranks = dist.get_rank(axis), dist.get_world_size(axis)
            for piece in chunks.cut(flat.gradient, ranks):
                yield ring.all_reduce(flat.gradient[piece], axis, rank, ranks)
