"""The small message before tokens travel: each rank's choices, and whether any rank has failed.

Each rank contributes one row of float64, which all ranks gather:

    how often its tokens chose each expert, by choice    experts x top_k
    the sum of its tokens' probabilities of each expert  experts
    a checksum of its circumstances, or -1 if it failed  1

A rank with invalid tokens sends its row as well. So no rank waits for a rank that has raised an
error, and no token is sent before every rank knows that none has failed.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from naranhi.distributed import from_all_ranks

FAILED = -1.0  # instead of the checksum, on a rank that raises an error
NOT_FINITE = "tokens, or the router's weights, are NaN or infinite"


def gather_counts(
    counts: torch.Tensor,
    sums: torch.Tensor,
    circumstances: str,
    group: dist.ProcessGroup | None,
    replicas: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counts of all ranks, and the sum of all ranks' probabilities.

    Args:
        counts: this rank's `count_choices`, (experts, top_k).
        sums: the sum of this rank's tokens' probabilities, (experts).
        circumstances: a description of what must be the same on every rank in this step.
        group: the ranks over which the experts are divided.
        replicas: the ranks with copies of the same experts, or None.

    Returns:
        counts of shape (sources, experts, top_k), in which the ranks of the first copy come first;
        sums of shape (experts), in float64. Both are on the CPU, which derives from them what to
        send: it waits for the GPU here, once, and not for each decision.

    Raises:
        ValueError: on every rank, if a rank has failed, has different circumstances, or has a
            probability that is NaN.
    """
    sign = zlib.crc32(circumstances.encode())
    last = torch.tensor([sign], dtype=torch.float64, device=sums.device)
    row = torch.cat([counts.flatten().double(), sums.double(), last])
    table = _gather(row, group, replicas).cpu()
    if (table[:, -1] != sign).any():
        _explain(None, circumstances, group, replicas)
    total = table[:, counts.numel() : -1].sum(0)
    if not total.isfinite().all():
        problem = None if sums.isfinite().all() else NOT_FINITE
        _explain(problem, circumstances, group, replicas)
    return table[:, : counts.numel()].long().view(-1, *counts.shape), total


def report(
    problem: str,
    columns: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    replicas: dist.ProcessGroup | None,
) -> None:
    """Raise ValueError on every rank for this rank's problem; call it instead of `gather_counts`.

    Args:
        problem: what is wrong on this rank.
        columns: the length of the counts and the sums together.
        device: where messages are sent from.
        group: the ranks over which the experts are divided.
        replicas: the ranks with copies of the same experts, or None.
    """
    row = torch.zeros(columns + 1, dtype=torch.float64, device=device)
    row[-1] = FAILED
    _gather(row, group, replicas)
    _explain(problem, None, group, replicas)


def _gather(row, group, replicas):
    """Return the rows of all sources, (sources, columns)."""
    for axis in (group, replicas) if replicas else (group,):
        rows = row.new_empty(dist.get_world_size(axis), *row.shape)
        dist.all_gather(list(rows), row, axis)
        row = rows
    return row.view(-1, row.shape[-1])


def _explain(problem, circumstances, group, replicas):
    """Raise ValueError on every rank. All ranks call this, because all have seen the table."""
    reports = [(dist.get_rank(), problem, circumstances)]
    for axis in (group, replicas) if replicas else (group,):
        reports = [report for others in from_all_ranks(reports, axis) for report in others]
    problems = dict.fromkeys(problem for _, problem, _ in reports if problem)
    for problem in problems:
        ranks = ", ".join(str(rank) for rank, other, _ in reports if other == problem)
        raise ValueError(f"on rank {ranks}: {problem}")
    first, _, expected = reports[0]
    rank, given = next((rank, other) for rank, _, other in reports if other != expected)
    raise ValueError(f"the ranks' tokens differ. Rank {first}: {expected}. Rank {rank}: {given}")
