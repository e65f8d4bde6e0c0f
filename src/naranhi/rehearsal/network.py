"""Two groups of ranks with a slow link between them. Units: seconds, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from naranhi import collectives
from naranhi.distributed import links


class Network(NamedTuple):
    """The first half of the ranks and the second, with quick links within and a slow one between.

    Attributes:
        near: A message's latency in seconds, and its seconds for each byte, within a half.
        far: The same from one half to the other.
    """

    near: tuple[float, float]
    far: tuple[float, float]

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Delay this rank's messages. Enter it on every rank.

        torch's all-reduce sends its messages itself, so no link delays them. Sums of floats
        therefore use `collectives.all_reduce`, which does the same by send and receive.
        """
        torchs = dist.all_reduce

        def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
            if op != dist.ReduceOp.SUM or not tensor.is_floating_point():
                return torchs(tensor, op, group, async_op)  # ranks that agree on numbers
            collectives.all_reduce(tensor, group)
            return _Done() if async_op else None

        near, far = self.halves()
        with links.paced(*self.near, near), links.paced(*self.far, far):
            dist.all_reduce = all_reduce
            try:
                yield
            finally:
                dist.all_reduce = torchs

    @staticmethod
    def halves() -> tuple[range, range]:
        """Return the ranks of this rank's half, and those of the other half.

        Raises:
            ValueError: If the ranks cannot be halved.
        """
        ranks = dist.get_world_size()
        if ranks % 2:
            raise ValueError(f"{ranks} ranks are not two groups of one size: start an even number")
        half = ranks // 2
        low, high = range(half), range(half, ranks)
        return (low, high) if dist.get_rank() < half else (high, low)


class _Done:
    """A finished work, with the interface of torch's."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def meet(group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks, by a message that no link delays."""
    dist.barrier(group)


def slowest(seconds: list[float]) -> list[float]:
    """Return, for each of these times, the longest of any rank."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()
