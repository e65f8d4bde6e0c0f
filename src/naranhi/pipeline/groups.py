"""The process groups of a pipeline: created on all ranks at once, and destroyed with it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from naranhi.distributed import from_all_ranks
from naranhi.schedules import Channel

AGREEMENT = "agreement"  # purpose of the group of all ranks of a pipeline


def key_of(
    purpose: str | Channel | Sequence[int], pipeline: dist.ProcessGroup
) -> tuple[tuple[int, ...], Hashable]:
    """Return the key of a purpose's process group: its ranks in the world, and the purpose.

    The group for agreement numbers its ranks as the pipeline does, which may differ from the
    world's order (`new_group(..., sort_ranks=False)`). Other groups use the world's order.

    Args:
        purpose: AGREEMENT, a Channel, or the ranks that share a parameter.
        pipeline: the ranks of the pipeline.
    """
    if purpose == AGREEMENT:
        return tuple(dist.get_process_group_ranks(pipeline)), purpose
    ranks = purpose[:2] if isinstance(purpose, Channel) else purpose
    return tuple(sorted(dist.get_global_rank(pipeline, rank) for rank in ranks)), purpose


def new_groups(
    local: dict[str, Any], timeout: float
) -> dict[tuple[tuple[int, ...], Hashable], dist.ProcessGroup]:
    """Create this rank's process groups, unless something is wrong on any rank of the world.

    Every rank of the world calls this. Torch creates a group on all ranks at once, members or not,
    and in the same order, so every rank creates the groups of all pipelines.

    Args:
        local: what this rank was given for its pipeline, by name; empty for a rank in no pipeline.
            "pipeline": the pipeline's ranks in the world. On these, all entries must be equal
                except "replicas", "place in the pipeline" and "copies".
            "replicas": the ranks in the world that have the same stages in other pipelines, or
                None. On these, all entries must be equal except "pipeline", "groups" and "copies".
            "groups": the groups that the ranks of the pipeline need among them, as pairs (ranks in
                the world, purpose).
            "device": the type of the device on which the pipeline computes; goes with "groups".
            "copies": see `tied_weights.copies`.
            "error": what is wrong on this rank, if anything is.
        timeout: seconds that each message may take.

    Returns:
        `{(ranks, purpose): group}`, of the pairs in this rank's "groups".

    Raises:
        Exception: the error of any rank.
        ValueError: ranks of a pipeline, or replicas, were given different things, or copies that
            are not equal.
    """
    gathered = from_all_ranks(local)
    for given in (local, *gathered):
        if "error" in given:
            raise given["error"]
    for which, called, but in (
        ("pipeline", "of one pipeline", {"replicas", "place in the pipeline", "copies"}),
        ("replicas", "replicas of one another", {"pipeline", "groups", "copies"}),
    ):
        _compare(gathered, which, called, but)
        _compare_copies(gathered, which, called)
    groups = {}
    for (ranks, purpose), device in {
        pair: given["device"] for given in gathered for pair in given.get("groups", ())
    }.items():
        order = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout),
            **order,
            group_desc="unchecked",
            # The ranks agree through their CPUs, which would otherwise wait for their GPUs.
            backend="cpu:gloo,cuda:nccl" if device == "cuda" and purpose != AGREEMENT else "gloo",
        )
        if (ranks, purpose) in local.get("groups", ()):
            groups[ranks, purpose] = group
    return groups


def _compare(gathered, which, called, but):
    """Raise ValueError if two ranks that belong together were given different things.

    `which` names the entry that lists the ranks to compare, `called` is their relation in the
    error, and `but` names the entries that may differ.
    """
    for rank, given in enumerate(gathered):
        other = (given.get(which) or [rank])[0]
        expected = gathered[other]
        for what in given:
            if what not in but and given[what] != expected.get(what):
                short = what not in ("schedule", "groups")
                raise ValueError(
                    f"rank {other} and rank {rank}, {called}, disagree on {what}"
                    + f": {expected.get(what)} and {given[what]}" * short
                )


def _compare_copies(gathered, which, called):
    """Raise ValueError if two ranks that belong together have different values of a tensor."""
    first = {}
    for rank, given in enumerate(gathered):
        for name, digest in given.get("copies", {}).get(which, {}).items():
            other, expected = first.setdefault((given[which], name), (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"rank {other} and rank {rank}, {called}, have different values of {name}: "
                    "give both the same, by one seed or one checkpoint"
                )


def let_go(users: Sequence[Any], groups: dict[Any, dist.ProcessGroup]) -> None:
    """Close the groups of a pipeline, and make their users drop them.

    Gloo closes a connection once nothing refers to its group or its works, which is how the peers
    learn of a failure.

    Args:
        users: objects that keep a group, and drop it in their method `close`.
        groups: the groups; emptied.
    """
    for group in groups.values():
        if group in dist.distributed_c10d._world.pg_map:  # not destroyed with all others yet
            dist.destroy_process_group(group)
    groups.clear()
    for user in users:
        user.close()


def join_group_creation() -> None:
    """Take part in the creation of process groups, on a rank of the world that is in no pipeline.

    Such a rank calls this while the others make their pipelines, because torch creates process
    groups on all ranks at once. On a mesh (`distributed.Mesh`) no rank calls this: each is in a
    pipeline, and all make theirs by the one line `Pipeline(..., group=mesh.pipeline)`.
    """
    new_groups({}, 60.0)
