"""Assign GPUs to ranks, whether a launcher shows a rank all GPUs of its host or only its own.

A rank that sees one GPU cannot tell whether the ranks beside it see the same one: `srun
--gpus-per-task=1` and `CUDA_VISIBLE_DEVICES=$LOCAL_RANK` show each rank a different GPU, which it
calls number 0. The identifiers of the GPUs tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def visible() -> list[str]:
    """Return the identifiers (UUIDs) of the GPUs that this process sees, in their order."""
    return [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]


def allot(visible: Sequence[Sequence[str]], local_ranks: Sequence[int]) -> list[int]:
    """Assign each rank a GPU that no other rank has.

    Args:
        visible: for each rank, the identifiers of the GPUs that it sees.
        local_ranks: for each rank, its number among the ranks of its host.

    Returns:
        For each rank, the index of its GPU among those that it sees.

    Raises:
        ValueError: a rank sees no GPU, or two ranks would share one.
    """
    indices, owner = [], {}
    for rank, (seen, local_rank) in enumerate(zip(visible, local_ranks, strict=True)):
        if not seen:
            raise ValueError(f"rank {rank} sees no GPU")
        index = local_rank % len(seen)
        other = owner.setdefault(seen[index], rank)
        if other != rank:
            raise ValueError(f"ranks {other} and {rank} would share a GPU")
        indices.append(index)
    return indices
