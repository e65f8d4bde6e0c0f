"""The ring: every rank sends only to its right neighbour, the fewest bytes in many messages.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from naranhi.collectives import chunks


def all_gather(
    blocks: Sequence[torch.Tensor], group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Start with block `rank` in place; send to the right what last came from the left."""
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    for step in range(ranks - 1):
        leaving, arriving = blocks[(rank - step) % ranks], blocks[(rank - step - 1) % ranks]
        works = chunks.start(group, sends=[(leaving, right)], receives=[(arriving, left)])
        yield
        chunks.finish(works)


def reduce_scatter(
    blocks: Sequence[torch.Tensor],
    output: torch.Tensor | None,
    group: dist.ProcessGroup,
    rank: int,
    ranks: int,
) -> Iterator[None]:
    """Send block i round the ring from rank i + 1, add at each rank, and end at rank i.

    The sum is in `output`, and `blocks` do not change; if `output` is None, sums replace blocks.
    """
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    leaving, memory = blocks[left], receive_buffers(blocks, 1 if output is None else 2)
    for step in range(2, ranks + 1):
        own = blocks[(rank - step) % ranks]
        arriving = memory[step % len(memory)][: len(own)]
        works = chunks.start(group, sends=[(leaving, right)], receives=[(arriving, left)])
        yield
        chunks.finish(works)
        total = own if output is None else output if step == ranks else arriving
        leaving = torch.add(arriving, own, out=total)


def receive_buffers(blocks: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return memory for all steps: touching fresh pages costs as much as sending them."""
    return [torch.empty_like(blocks[0]) for _ in range(min(count, len(blocks) - 1))]


def all_reduce(
    data: torch.Tensor, group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Run a reduce-scatter, then an all-gather."""
    blocks = data.tensor_split(ranks)
    yield from reduce_scatter(blocks, None, group, rank, ranks)
    yield from all_gather(blocks, group, rank, ranks)
