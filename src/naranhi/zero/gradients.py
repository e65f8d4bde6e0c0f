"""The gradients of ZeRO's units, summed and scattered one unit after the other."""

import torch.distributed as dist

from naranhi.data_parallel.sync import have_gradients


class Reductions:
    """Sums in one order on all ranks, at most one in flight: that of a unit whose backward is over,
    while the next unit computes.

    units: all of the model, the root last. names: {trained parameter: its name}. stage, group and
    tell: as in `zero.Zero`.
    seen: after the last sum of a step, a row for each rank: which parameters have a gradient.
    """

    def __init__(self, units, names, stage, group, tell):
        self.order = [unit for unit in (*units[-2::-1], units[-1]) if unit.trained]
        self.flats = [flat for unit in units for flat in unit.trained]
        self.names, self.stage, self.group, self.tell = names, stage, group, tell
        self.seen = self._in_flight = None  # the latter: a unit and its Transfer
        self.reset()

    def reset(self):
        """Ready for another backward."""
        self._started = 0  # how many of `order` in this one

    def start(self, last):
        """Sum the gradients of units that are done; last: whether they are the step's last."""
        while self._started < len(self.order) and self.order[self._started].done:
            unit = self.order[self._started]
            self._started += 1
            self.finish()
            unit.take()
            self.tell("reduce", unit.name)
            self._in_flight = unit, unit.reduce(*self._telling(last))

    def _telling(self, last):
        """Kernels beside a sum: beside a step's last, that tells who has which gradient."""
        if last and self._started == len(self.order):
            seen = {param for flat in self.flats for param in flat.seen}
            self.seen, kernel = have_gradients(
                [param in seen for param in self.names], self.group, self.flats[0].shard.device
            )
            yield kernel

    def advance(self):
        """Go on with a sum while another unit computes. When all but its last message have come, it
        is finished: its row is freed before the other unit has all its gradients."""
        if self._in_flight:
            if self._in_flight[1].steps < dist.get_world_size(self.group) - 1:
                self._in_flight[1].advance()
            elif self.stage > 1:
                self.finish()

    def finish(self):
        """Wait for the sum in flight."""
        if self._in_flight:
            unit, transfer = self._in_flight
            transfer.finish()
            unit.reduced()
            self.tell("reduced", unit.name)
            self._in_flight = None
