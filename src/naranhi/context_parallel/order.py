"""Which positions of a sequence each rank has: one part in plain order, two in head-and-tail order.

With a causal mask, later positions see more keys. In plain order rank 0, with the first positions,
computes least, and the last rank most. In head-and-tail order the sequence is cut into 2 x ranks
parts, and rank r has parts r and 2 x ranks - 1 - r: a head and a tail, which together see the same
number of keys on every rank.

    ranks = 2     plain        0 0 1 1
                  head_tail    0 1 1 0

Sources: Llama Team, "The Llama 3 herd of models" (2024), section 3.3.2; ring-flash-attention, issue
2, "Balancing computation with zigzag blocking" (2024).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from naranhi import collectives

ORDERS = ("plain", "head_tail")


class Run(NamedTuple):
    """Consecutive positions that lie side by side in a tensor.

    Attributes:
        start: the first position in the whole sequence.
        length: the number of positions.
        offset: the index of the first one in the tensor.
    """

    start: int
    length: int
    offset: int


def runs(order: str, ranks: int, rank: int, length: int) -> list[Run]:
    """Return the runs of positions that a rank has, in the order of its tensors.

    Args:
        order: "plain" or "head_tail".
        ranks: the number of ranks.
        rank: the rank.
        length: the number of positions on each rank.

    Raises:
        ValueError: the order is unknown, or head-and-tail order cannot halve the length.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, not {order!r}")
    if order == "plain":
        return [Run(rank * length, length, 0)]
    half, odd = divmod(length, 2)
    if odd:
        raise ValueError(
            f"head_tail order halves each rank's part, so its length must be even, not {length}"
        )
    return [Run(rank * half, half, 0), Run((2 * ranks - 1 - rank) * half, half, half)]


def positions(
    length: int,
    group: dist.ProcessGroup | None = None,
    *,
    order: str = "plain",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the positions of this rank's part, (length / ranks,), for embeddings of positions.

    Args:
        length: the length of the whole sequence.
        group: the process group; None for the default one.
        order: "plain" or "head_tail".
        device: where the tensor is made.

    Raises:
        ValueError: the length is not a multiple of the number of ranks, or in head-and-tail order
            of twice that number; or the order is unknown.
    """
    parts = _own_runs(length, group, order)
    return torch.cat(
        [torch.arange(run.start, run.start + run.length, device=device) for run in parts]
    )


def split_sequence(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    order: str = "plain",
    dim: int = -1,
) -> torch.Tensor:
    """Return this rank's part of x along `dim`, where x is the same on every rank.

    Args:
        x: a tensor of the whole sequence, in sequence order: tokens, targets, activations.
        group: the process group; None for the default one.
        order: "plain" or "head_tail".
        dim: the dimension of the sequence.

    Raises:
        ValueError: as `positions`.
    """
    parts = _own_runs(x.shape[dim], group, order)
    return torch.cat([x.narrow(dim, run.start, run.length) for run in parts], dim)


def join_sequence(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    order: str = "plain",
    dim: int = -1,
) -> torch.Tensor:
    """Return the whole sequence, gathered from the ranks' parts; no gradient flows through it.

    Args:
        x: this rank's part, as `split_sequence` returns it.
        group: the process group; None for the default one.
        order: "plain" or "head_tail".
        dim: the dimension of the sequence.
    """
    gathered = x.new_empty((dist.get_world_size(group), *x.shape))
    collectives.all_gather(gathered, x, group)
    return in_sequence(list(gathered), order, dim)


def in_sequence(parts: list[torch.Tensor], order: str, dim: int) -> torch.Tensor:
    """Concatenate all ranks' parts, given in rank order, along `dim`, in sequence order."""
    by_start = {
        run.start: part.narrow(dim, run.offset, run.length)
        for rank, part in enumerate(parts)
        for run in runs(order, len(parts), rank, part.shape[dim])
    }
    return torch.cat([by_start[start] for start in sorted(by_start)], dim)


def by_rank(x: torch.Tensor, ranks: int, order: str, dim: int) -> torch.Tensor:
    """Split a tensor in sequence order into the ranks' parts, (ranks, ...): undo `in_sequence`."""
    length = x.shape[dim] // ranks
    shape = list(x.shape)
    shape[dim] = length
    parts = x.new_empty((ranks, *shape))
    for rank, part in enumerate(parts):
        for start, count, offset in runs(order, ranks, rank, length):
            part.narrow(dim, offset, count).copy_(x.narrow(dim, start, count))
    return parts


def _own_runs(length, group, order):
    ranks = dist.get_world_size(group)
    if length % ranks:
        raise ValueError(
            f"{ranks} ranks do not divide a sequence of {length}: pad it, with targets that the "
            "loss ignores"
        )
    return runs(order, ranks, dist.get_rank(group), length // ranks)
