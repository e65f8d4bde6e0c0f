"""Which rows travel where, from one small table of counts that every rank has.

The table says how often each rank's tokens chose each expert, as a first choice, as a second, and
so on. Every rank derives from it what it sends, what it receives, and what is dropped. No other
message is needed, and all ranks decide alike.

# Note [Who is dropped]

With a capacity, an expert takes the first choices of all ranks' tokens before any second choice,
and among equal choices the tokens of rank 0 first, in order. One process with the tokens of all
ranks, concatenated in rank order, decides the same.

Source: Lepikhin et al., "GShard" (2021), algorithm 1, for first choices before second ones (in
GShard each rank fills its own capacity).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Plan(NamedTuple):
    """What a rank does with the choices of its tokens.

    Args:
        order: the indices of the choices to send, sorted by expert, (rows sent); choice `c` of
            token `t` has index `c * tokens + t`.
        sent: the number of rows for each rank of the group.
        received: the rows from each rank for each expert of this rank, (ranks, own experts).
        dropped: how many choices of this rank's tokens find their expert full.
    """

    order: torch.Tensor
    sent: list[int]
    received: torch.Tensor
    dropped: int


def count_choices(experts: torch.Tensor, total: int) -> torch.Tensor:
    """Return how many tokens have each expert as their first choice, second, ...: (total, top_k).

    Args:
        experts: the experts of each token, (tokens, top_k).
        total: the number of experts.
    """
    top_k = experts.shape[1]
    block = experts * top_k + torch.arange(top_k, device=experts.device)
    counts = experts.new_zeros(total * top_k)  # `bincount` would wait for a GPU
    return counts.scatter_add_(0, block.flatten(), torch.ones_like(block).flatten()).view(total, -1)


def make_plan(
    experts: torch.Tensor, counts: torch.Tensor, rank: int, ranks: int, capacity: int | None = None
) -> Plan:
    """Return what this rank sends, receives and drops.

    Args:
        experts: the experts of this rank's tokens, (tokens, top_k).
        counts: the `count_choices` of all ranks, (sources, experts, top_k). With copies of the
            experts, the ranks of the first copy come first.
        rank: this rank's place among the sources.
        ranks: the number of ranks over which the experts are divided.
        capacity: how many choices an expert takes in the whole step; None for all.
    """
    kept = counts if capacity is None else _within(counts, capacity)
    order = experts.t().flatten().argsort(stable=True)  # by expert, then choice, then token
    if capacity is not None:
        order = order[_first_of_each(counts[rank].flatten(), kept[rank].flatten())]
    first = rank - rank % ranks  # of the sources in this rank's group
    rows = kept[first : first + ranks].sum(-1).cpu()  # (ranks, experts)
    by_rank = rows.unflatten(1, (ranks, -1))  # (from, to, own experts)
    return Plan(
        order,
        by_rank[rank - first].sum(-1).tolist(),
        by_rank[:, rank - first],
        experts.numel() - len(order),
    )


def _within(counts, capacity):
    """Return how many of each source's choices an expert keeps: see Note [Who is dropped]."""
    in_turn = counts.permute(1, 2, 0).flatten(1)  # (experts, choices x sources), in order
    before = in_turn.cumsum(1) - in_turn
    kept = torch.minimum((capacity - before).clamp(min=0), in_turn)
    return kept.view(counts.shape[1], counts.shape[2], -1).permute(2, 0, 1)


def _first_of_each(sizes, kept):
    """Return a mask over blocks of these sizes that is true for the first `kept` of each."""
    start = sizes.cumsum(0) - sizes
    position = torch.arange(int(sizes.sum()), device=sizes.device)
    return position - start.repeat_interleave(sizes) < kept.repeat_interleave(sizes)
