"""Gradients summed after the backward: experts over their copies, all else over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from naranhi.collectives import all_reduce
from naranhi.collectives.buckets import buckets, pack, unpack
from naranhi.expert_parallel.moe import MoE
from naranhi.tensor_parallel.shards import ShardedModule


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
    the layer's group has other experts). Those of routers and of everything else are summed over
    all ranks. Call it once per step, after the last backward, on every rank. A gradient that is
    missing counts as zero, because a rank may have no token.

    Gradients are summed and not averaged: divide the loss by the count of the whole step, as in
    `data_parallel`.

    Args:
        model: this rank's model, after its backward.
        everyone: the ranks that train the model together, of all copies and all experts; None for
            the default group. On a mesh with a tensor axis, those with the same place on it.

    Raises:
        ValueError: ranks of `everyone` hold other shards of a tensor parallel layer; raised before
            anything is sent.
    """
    sum_over_copies(model, dist.group.WORLD if everyone is None else everyone)


def sum_over_copies(model: nn.Module, replicas: dist.ProcessGroup | None) -> None:
    """Do as `sum_gradients`, where None means that no other rank holds what is no expert.

    Args:
        model: this rank's model, after its backward.
        replicas: the ranks that hold everything but experts alike, such as `Mesh.replicas`.

    Raises:
        ValueError: see `sum_gradients`.
    """
    if replicas is not None:
        _require_same_shards(model, replicas)
    held_by = expert_parameters(model)
    grads = {}  # by group
    for param in model.parameters():
        group = held_by.get(param, replicas)
        if param.requires_grad and group is not None and dist.get_world_size(group) > 1:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            grads.setdefault(group, []).append(param.grad)
    for group, some in grads.items():
        for bucket in buckets(some):
            flat = pack(bucket)
            all_reduce(flat, group)
            unpack(flat, bucket)


def _require_same_shards(model, group):
    """Raise ValueError if ranks of the group hold other shards than this one, experts aside."""
    ranks = {*dist.get_process_group_ranks(group)} - {dist.get_rank()}
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule) and module.splits and not isinstance(module, MoE):
            others = ranks & {*dist.get_process_group_ranks(module.group)}
            if others:
                raise ValueError(
                    f"{type(module).__name__} {name or 'itself'} has other shards on rank "
                    f"{', '.join(map(str, sorted(others)))}, whose gradients belong to other "
                    "parameters: pass the ranks that hold the same shards, such as Mesh.replicas"
                )
