"""Partners at distances 1, 2, 4, ...: log2(ranks) steps, so few messages for a short tensor.

Only a power of two can be halved all the way down. `all_reduce` and `all_reduce_whole` run on any
number of ranks: each rank beyond the largest power of two first adds its data to a partner's, and
receives the result at the end.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (2005), sections 4.1 to 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from naranhi.collectives import chunks


def all_gather(
    flat: torch.Tensor, group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Exchange all blocks held so far with one partner per step: recursive doubling.

    Each step exchanges twice as many blocks as the step before.

    Args:
        flat: the output, `ranks` blocks one after the other, of which block `rank` is in place.
        group: the process group.
        rank: this rank in the group.
        ranks: the number of ranks, a power of two.
    """
    block = len(flat) // ranks
    for held in chunks.distances(ranks):
        partner = rank ^ held
        kept, theirs = (
            flat.narrow(0, place // held * held * block, held * block) for place in (rank, partner)
        )
        works = chunks.start(group, sends=[(kept, partner)], receives=[(theirs, partner)])
        yield
        chunks.finish(works)


def reduce_scatter(
    flat: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Send a partner its half of the blocks and sum the other half: recursive halving.

    Args:
        flat: the input, `ranks` blocks one after the other; it does not change.
        output: block `rank` of the sum.
        group: the process group.
        rank: this rank in the group.
        ranks: the number of ranks, a power of two.
    """
    kept = flat
    for distance in reversed(chunks.distances(ranks)):
        low, high = kept.tensor_split(2)
        kept, given = (high, low) if rank & distance else (low, high)
        arriving, partner = torch.empty_like(kept), rank ^ distance
        works = chunks.start(group, sends=[(given, partner)], receives=[(arriving, partner)])
        yield
        chunks.finish(works)
        kept = torch.add(kept, arriving, out=output if distance == 1 else arriving)


def all_reduce(
    data: torch.Tensor, group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Halve until each rank has a part of the sum, then double until every rank has all of it."""
    return with_extra_ranks(halve_and_double, data, group, rank, ranks)


def all_reduce_whole(
    data: torch.Tensor, group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Exchange the whole tensor in each step, and add it: the fewest messages, the most bytes."""
    return with_extra_ranks(exchange_whole, data, group, rank, ranks)


def with_extra_ranks(
    steps: Callable[..., Iterator[None]],
    data: torch.Tensor,
    group: dist.ProcessGroup,
    rank: int,
    ranks: int,
) -> Iterator[None]:
    """Run `steps` on 2^k ranks; the rest send data before and get the sum after."""
    core = 2 ** (ranks.bit_length() - 1)
    if rank >= core:
        works = chunks.start(group, sends=[(data, rank - core)])
        yield
        chunks.finish(works)
        works = chunks.start(group, receives=[(data, rank - core)])
        yield
        chunks.finish(works)
        return
    if rank + core < ranks:
        extra = torch.empty_like(data)
        works = chunks.start(group, receives=[(extra, rank + core)])
        yield
        chunks.finish(works)
        data.add_(extra)
    yield from steps(data, group, rank, core)
    if rank + core < ranks:
        works = chunks.start(group, sends=[(data, rank + core)])
        yield
        chunks.finish(works)


def halve_and_double(
    data: torch.Tensor, group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Exchange and add halves, quarters, ...; then repeat the steps in reverse with the sums."""
    kept, steps = data, []
    for distance in reversed(chunks.distances(ranks)):
        low, high = kept.tensor_split(2)
        kept, given = (high, low) if rank & distance else (low, high)
        arriving, partner = torch.empty_like(kept), rank ^ distance
        works = chunks.start(group, sends=[(given, partner)], receives=[(arriving, partner)])
        yield
        chunks.finish(works)
        kept.add_(arriving)
        steps.append((kept, given, partner))
    for kept, given, partner in reversed(steps):
        works = chunks.start(group, sends=[(kept, partner)], receives=[(given, partner)])
        yield
        chunks.finish(works)


def exchange_whole(
    data: torch.Tensor, group: dist.ProcessGroup, rank: int, ranks: int
) -> Iterator[None]:
    """Add the partner's whole tensor to this rank's, at each distance."""
    arriving = torch.empty_like(data)
    for distance in chunks.distances(ranks):
        partner = rank ^ distance
        works = chunks.start(group, sends=[(data, partner)], receives=[(arriving, partner)])
        yield
        chunks.finish(works)
        data.add_(arriving)  # the same bits in either order
