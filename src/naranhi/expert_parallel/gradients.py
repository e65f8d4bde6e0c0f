"""Gradients summed after the backward: experts over their copies, all else over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from naranhi.collectives import all_reduce
from naranhi.collectives.buckets import buckets, pack, unpack
from naranhi.collectives.chunks import overlap
from naranhi.data_parallel.supported import require_unsummed
from naranhi.data_parallel.sync import have_gradients
from naranhi.expert_parallel.moe import MoE
from naranhi.tensor_parallel.shards import ShardedModule

FROZEN, ABSENT, PRESENT = 0, 1, 2  # a parameter, or its gradient, in the table that ranks compare


def expert_parameters(
    model: nn.Module,
) -> dict[nn.Parameter, dist.ProcessGroup | None]:
    """Return the parameters of experts, each with the ranks that hold a copy of it, or None.

    Args:
        model: a module, of which any layers may be a `MoE`.
    """
    return {
        param: module.replicas
        for module in model.modules()
        if isinstance(module, MoE)
        for param in (module.up, module.down)
    }


def sum_gradients(model: nn.Module, everyone: dist.ProcessGroup | None = None) -> None:
    """Sum each gradient over the ranks that hold the parameter, in place.

    The gradients of experts are summed over the layer's `replicas` (without replicas, not at all:
    no other rank has these experts). Those of routers and of everything else are summed over
    all ranks. Call it once per step, after the last backward, on every rank. A gradient that is
    missing counts as zero, because a rank may have no token. A gradient missing on all these ranks
    stays None, so that an optimizer leaves the parameter alone, as in one process.

    Gradients are summed and not averaged: divide the loss by the count of the whole step, as in
    `data_parallel`.

    Args:
        model: this rank's model, after its backward.
        everyone: the ranks that train the model together, of all copies and all experts; None for
            the default group. On a mesh with a tensor axis, those with the same place on it.

    Raises:
        ValueError: ranks of `everyone` hold different shards of a tensor-parallel layer; raised
            before anything is sent.
        RuntimeError: a parameter is trained on some of the ranks that hold it, and frozen on
            others; raised on every rank, before any gradient is summed. Also if a parameter belongs
            to a `DDP` or `Zero`, which sums its gradient.
    """
    sum_over_copies(model, dist.group.WORLD if everyone is None else everyone)


def sum_over_copies(model: nn.Module, replicas: dist.ProcessGroup | None) -> None:
    """Do as `sum_gradients`; None means that only experts have copies on other ranks.

    Args:
        model: this rank's model, after its backward.
        replicas: the ranks that hold the same parameters outside experts, such as `Mesh.replicas`.

    Raises:
        ValueError: see `sum_gradients`.
        RuntimeError: see `sum_gradients`.
    """
    require_unsummed(model)
    if replicas is not None:
        _require_same_shards(model, replicas)
    for group, params in _with_gradient(model, replicas).items():
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        for bucket in buckets([param.grad for param in params]):
            flat = pack(bucket)
            all_reduce(flat, group)
            unpack(flat, bucket)


def _with_gradient(model, replicas):
    """Return {group: the parameters of which some rank of the group has a gradient}."""
    held_by, copies = expert_parameters(model), {}
    for name, param in model.named_parameters():  # frozen ones too, or ranks' lists would differ
        group = held_by.get(param, replicas)
        if group is not None and dist.get_world_size(group) > 1:
            copies.setdefault(group, {})[name] = param
    problem, found = None, {}
    # Experts come first, so that all ranks hear if copies of experts differ.
    for group, params in sorted(copies.items(), key=lambda item: item[0] is replicas):
        row = [*map(_state, params.values()), problem is not None]
        flags, kernel = have_gradients(row, group, next(iter(params.values())).device)
        overlap([kernel])
        table = flags.tolist()
        problem = problem or _difference(params, table, dist.get_process_group_ranks(group))
        columns = zip(params.values(), zip(*table, strict=True), strict=False)
        found[group] = [param for param, column in columns if PRESENT in column]
    if problem:
        raise RuntimeError(problem)
    return found


def _state(param):
    return FROZEN if not param.requires_grad else ABSENT if param.grad is None else PRESENT


def _difference(names, table, ranks):
    """Return what is wrong if ranks freeze different parameters, or None."""
    *columns, failed = zip(*table, strict=True)
    for name, column in zip(names, columns, strict=True):
        frozen = [rank for rank, state in zip(ranks, column, strict=True) if state == FROZEN]
        if 0 < len(frozen) < len(ranks):
            trained = [rank for rank in ranks if rank not in frozen]
            return (
                f"parameter {name} is trained on rank {_list(trained)}, and frozen on rank "
                f"{_list(frozen)}: freeze the same parameters on every rank that holds a copy"
            )
    if any(failed):
        wrong = [rank for rank, failure in zip(ranks, failed, strict=True) if failure]
        return f"rank {_list(wrong)}: copies of experts are trained on some ranks, frozen on others"
    return None


def _list(ranks):
    return ", ".join(map(str, sorted(ranks)))


def _require_same_shards(model, group):
    """Raise ValueError if a rank of the group holds different shards, experts aside."""
    ranks = {*dist.get_process_group_ranks(group)} - {dist.get_rank()}
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule) and module.splits and not isinstance(module, MoE):
            others = ranks & {*dist.get_process_group_ranks(module.group)}
            if others:
                raise ValueError(
                    f"{type(module).__name__} {name or 'itself'} has different shards on rank "
                    f"{_list(others)}, whose gradients belong to different "
                    "parameters: pass the ranks that hold the same shards, such as Mesh.replicas"
                )
