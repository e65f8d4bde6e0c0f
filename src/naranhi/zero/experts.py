"""Experts under ZeRO: sharded over the ranks with copies of them, instead of over all ranks.

    dense parameters    `group` of `zero.Zero`: the ranks along data, expert and context
    experts             the layer's `replicas`: the ranks along data, context and tensor

Along the expert axis every rank has different experts, so there are no copies to shard. Along a
tensor axis dense layers are split, and experts are copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from naranhi.expert_parallel import ExpertsMLP, MoE
from naranhi.tensor_parallel.gradient_norm import split_over

if TYPE_CHECKING:
    import torch

    from naranhi.zero.flat_param import FlatParam
    from naranhi.zero.units import Unit


def copies_of_experts(model: nn.Module) -> dict[nn.Parameter, tuple[dist.ProcessGroup, ...]]:
    """Return {parameter of experts: (the ranks with copies of it,)}, () for this rank alone.

    A layer that has all experts on each rank and no `replicas` is treated like a dense layer.

    Args:
        model: The model to shard.
    """
    return {param: (*filter(None, [moe.replicas]),) for param, moe in _experts(model)}


def parts_by_groups(
    model: nn.Module, flats: Iterable[FlatParam], group: dist.ProcessGroup
) -> dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]]:
    """Return this rank's gradients, keyed by the groups that they are split over, for the norm.

    Args:
        model: The sharded model.
        flats: Its flat parameters, whose gradients are reduced.
        group: The ranks over which dense parameters are sharded.
    """
    over = {param: (tensor, group) for param, tensor in split_over(model).items()}
    copies = copies_of_experts(model)
    over |= {p: (*copies[p], moe.group or dist.group.WORLD) for p, moe in _experts(model)}
    if not over:
        return {(group,): [flat.gradient for flat in flats]}
    parts = {}
    for flat in flats:
        for param, part in zip(flat.parameters, flat.gradient_parts(), strict=True):
            parts.setdefault(over.get(param, (group,)), []).append(part)
    return parts


def require_own_loss(units: Iterable[Unit], stage: int) -> None:
    """Raise if the auxiliary loss of experts would bypass the output of their unit.

    Args:
        units: The units of a model, without the root.
        stage: The stage of ZeRO; below 3 parameters are whole at any time.

    Raises:
        TypeError: Naming the unit.
    """
    for unit in units if stage == 3 else ():
        inside = [part for module in unit.modules for part in module.modules()]
        if any(isinstance(part, ExpertsMLP) and part.coefficient is None for part in inside):
            raise TypeError(
                f"unit {unit.name} has experts whose auxiliary loss is not part of its output, so "
                "its backward would find no parameters at stage 3: pass add_experts, or "
                "divide_experts, a coefficient"
            )


def _experts(model):
    """Yield (parameter, its layer) of experts that not all ranks of the model have."""
    for moe in model.modules():
        if isinstance(moe, MoE) and (moe.ranks > 1 or moe.replicas is not None):
            yield from ((param, moe) for param in (moe.up, moe.down))
