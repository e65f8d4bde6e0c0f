"""Binomial trees: broadcast down, reduce up, in log2(ranks) steps of the whole tensor.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from naranhi.collectives import chunks


def broadcast(
    data: torch.Tensor, root: int, group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Copy the root's `data` to all ranks, from parent to children."""
    place = (rank - root) % ranks  # in the tree, whose root has place 0
    sent = []
    for distance in reversed(chunks.distances(ranks)):
        if place % (2 * distance) == distance:  # the parent has the data, this rank not yet
            arriving = chunks.start(group, receives=[(data, (rank - distance) % ranks)])
            yield
            chunks.finish(arriving)
        elif place % (2 * distance) == 0 and place + distance < ranks:
            sent += chunks.start(group, sends=[(data, (rank + distance) % ranks)])
    yield
    chunks.finish(sent)


def reduce(
    total: torch.Tensor, root: int, group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Sum every rank's `total` into the root's; the other ranks' do not change."""
    place = (rank - root) % ranks
    for distance in chunks.distances(ranks):
        if place % (2 * distance) == distance:  # this subtree is complete: send its sum up
            sent = chunks.start(group, sends=[(total, (rank - distance) % ranks)])
            yield
            chunks.finish(sent)
            return
        if place + distance < ranks:
            child = torch.empty_like(total)
            arriving = chunks.start(group, receives=[(child, (rank + distance) % ranks)])
            yield
            chunks.finish(arriving)
            total = torch.add(total, child, out=total if rank == root else child)
