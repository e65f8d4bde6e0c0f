"""Find out what a pipeline needs on this rank, and whether it can run, before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from naranhi.distributed import device_of
from naranhi.pipeline.groups import AGREEMENT, key_of
from naranhi.pipeline.partition import as_list, check_kinds, check_layers, check_values, cut
from naranhi.pipeline.sharding import check_sharding
from naranhi.pipeline.tied_weights import check_max_norm, check_memory, copies, tied_parameters
from naranhi.schedules import Schedule, channels, check, check_versions

if TYPE_CHECKING:
    from naranhi.pipeline.sharding import Sharding

Tied = list[tuple[str, nn.Parameter, tuple[int, ...]]]


def prepared(
    layers: Iterable[nn.Module],
    schedule: Schedule,
    loss_fn: Callable[..., torch.Tensor],
    group: dist.ProcessGroup,
    *,
    balance: Sequence[int] | None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
    versions: int | Sequence[int] | None,
    replicas: dist.ProcessGroup | None,
    sharding: Sharding | None,
    trial: str,
) -> tuple[dict[str, Any], list[list[nn.Module]], Tied]:
    """Return what `groups.new_groups` takes, the layers of each stage, and the tied parameters.

    The arguments are those of `pipeline.Pipeline`. A ValueError is not raised here but returned, as
    the entry "error", so that every rank can raise it.

    Raises:
        TypeError: at once, if the layers are not a list.
    """
    layers = as_list(layers)
    parts, tied, rank = [], [], dist.get_rank(group)
    several = replicas if replicas and dist.get_world_size(replicas) > 1 else None
    local = {
        "pipeline": tuple(dist.get_process_group_ranks(group)),
        "replicas": several and tuple(dist.get_process_group_ranks(several)),
        "number of replicas": several and dist.get_world_size(several),
        "place in the pipeline": rank,
        "device": device_of(group).type,
        "micro-batches": schedule.microbatches,
        "layers": len(layers),
        "balance": balance and list(balance),
        "trial": trial,
        "schedule": hashlib.sha256(str(schedule).encode()).hexdigest(),
    }
    try:
        check(schedule)
        if len(schedule) != dist.get_world_size(group):
            ranks = dist.get_world_size(group)
            raise ValueError(f"a schedule for {len(schedule)} ranks in a pipeline of {ranks}")
        if trial not in ("shapes", "data"):
            raise ValueError(f'trial is "shapes" or "data", not {trial!r}')
        parts = cut(
            layers, schedule.virtual_stages, balance, schedule.virtual_stages // len(schedule)
        )
        check_kinds(schedule, parts, optimizer, several)
        check_layers(layers)
        if local["device"] != "meta":  # where nothing has values
            check_values(parts, schedule.placement, rank)
        check_memory(parts, schedule.placement)
        check_max_norm(parts, schedule.placement, several is not None)
        check_sharding(schedule, parts, sharding, replicas, trial)
        if versions is not None:
            check_versions(schedule, versions)
        tied = tied_parameters(parts, schedule.placement)
        purposes = [AGREEMENT, *channels(schedule), *dict.fromkeys(ranks for *_, ranks in tied)]
        local["groups"] = [key_of(purpose, group) for purpose in purposes]
        local["copies"] = copies(parts, schedule.placement, rank, several, loss_fn)
    except ValueError as error:
        local["error"] = error
    return local, parts, tied


def refuse_gradients(parameters: Iterable[nn.Parameter], copied: object) -> None:
    """Raise RuntimeError if a parameter has a gradient before a step that sums over replicas.

    Args:
        parameters: this rank's parameters.
        copied: whether other ranks have copies of them.
    """
    summed = bool(copied) and torch.is_grad_enabled()
    if summed and any(parameter.grad is not None for parameter in parameters):
        raise RuntimeError(
            "a parameter still has a gradient of an earlier step, and that is a sum over the "
            "replicas already: call zero_grad(set_to_none=True) first"
        )
