"""The gradient norm of a model that is sharded over ranks, and clipping by that norm.

Every parameter counts once. The norm of sharded parameters is summed over their tensor-parallel
group, which the modules name (`splits` and `group`); that of replicated parameters is not summed.
Copies of a tied parameter count on one rank. Data-parallel replicas have equal gradients, so
nothing is summed over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite

import torch
import torch.distributed as dist
from torch import nn

from naranhi.collectives import all_gather
from naranhi.distributed import device_of
from naranhi.tensor_parallel.sequence_gradients import unsummed
from naranhi.tensor_parallel.shards import splits_of


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    counted_elsewhere: Iterable[nn.Parameter] = (),
) -> float:
    """Scale gradients in place to a norm of at most `max_norm`, and return the norm before.

    The norm is that of the whole model, as `torch.nn.utils.clip_grad_norm_` computes it in one
    process. Unlike that function, this one raises if the norm is not finite: scaling by such a norm
    would make every gradient zero or NaN.

    Call it on every rank, after all reductions of the step (of replicas, tied copies and sequence
    parallelism).

    Args:
        model: this rank's part of the model; its layers may be tensor-parallel.
        max_norm: the largest norm allowed, above 0.
        norm_type: the exponent of the norm, above 0; inf for the largest absolute value.
        groups: the other groups over whose ranks the model is distributed, such as a pipeline's.
        counted_elsewhere: parameters of this rank that count on another rank, such as later tied
            copies.

    Returns:
        The norm before scaling.

    Raises:
        ValueError: `max_norm` or `norm_type` is not above 0.
        RuntimeError: `sum_sequence_gradients` has not been called yet.
        FloatingPointError: the norm is not finite; raised on every rank, before any scaling.
    """
    if names := unsummed(model):
        raise RuntimeError(
            f"the gradient of {names[0]} is this rank's part of a sum: call "
            "sum_sequence_gradients before clipping"
        )
    split, gradients = split_over(model), [p.grad for p in model.parameters() if p.grad is not None]
    skipped = set(counted_elsewhere)
    parts = {(): [], **{(group,): [] for group in split.values()}}
    for parameter in model.parameters():
        if parameter.grad is not None and parameter not in skipped:
            parts[(split[parameter],) if parameter in split else ()].append(parameter.grad)
    default = device_of(groups[0]) if groups else None  # of a part without parameters
    device = next((parameter.device for parameter in model.parameters()), default)
    norm = norm_of_parts(parts, norm_type, groups, device)
    scale_to(gradients, max_norm, norm)
    return norm


def split_over(model: nn.Module) -> dict[nn.Parameter, dist.ProcessGroup]:
    """Return the sharded parameters, each with the group whose ranks hold its shards."""
    # Modules keep None, as groups cannot be copied; here it would mean "on no other rank".
    return {
        parameter: group or dist.group.WORLD for parameter, (_, group) in splits_of(model).items()
    }


def norm_of_parts(
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]],
    norm_type: float,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | None = None,
) -> float:
    """Return the norm of gradients that are distributed over the ranks of `groups`.

    Args:
        parts: this rank's gradients, by the groups over whose ranks they are sharded; those under
            () are whole. Every rank has the same groups in the same order.
        norm_type: the exponent of the norm.
        groups: groups over whose ranks the parameters are distributed.
        device: the device of the computation if a list of gradients is empty.
    """
    powers = []
    for own, tensors in parts.items():
        power = norm_power(tensors, norm_type, device)
        for group in own:
            power = over_ranks(power, norm_type, group)
        powers.append(power)
    total = torch.stack(powers)
    total = total.max() if norm_type == inf else total.sum()
    for group in groups:
        total = over_ranks(total, norm_type, group)
    return (total if norm_type == inf else total.pow(1 / norm_type)).item()


def norm_power(
    tensors: Sequence[torch.Tensor], norm_type: float = 2.0, device: torch.device | None = None
) -> torch.Tensor:
    """Return the contribution of these tensors to a norm, as a float64 scalar tensor.

    It is the sum of |x| ** norm_type over all elements x, and contributions are summed. For
    norm_type inf it is the largest |x|, and the largest contribution counts. Dtypes may be mixed,
    and complex. The result is float64: the square of a float32 norm may exceed float32.

    Args:
        tensors: tensors of any shape.
        norm_type: the exponent of the norm, above 0.
        device: the device of the result if all tensors are empty.

    Raises:
        ValueError: `norm_type` is not above 0.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, not {norm_type!r}")
    norms = [_norm(tensor, norm_type).double() for tensor in tensors if tensor.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(norms)
    return norms.max() if norm_type == inf else norms.pow(norm_type).sum()


def _norm(tensor, norm_type):
    small = tensor.dtype in (torch.bfloat16, torch.float16)
    return torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32 if small else None)


def over_ranks(power: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum (the maximum, for inf) of the ranks' `norm_power`: the same bits on each."""
    table = power.new_empty(dist.get_world_size(group))
    all_gather(table, power, group)
    return table.max() if norm_type == inf else table.sum()


def scale_to(gradients: Iterable[torch.Tensor], max_norm: float, norm: float) -> None:
    """Scale gradients, whose norm over all ranks is `norm`, in place to at most `max_norm`.

    Raises:
        ValueError: `max_norm` is not above 0.
        FloatingPointError: `norm` is not finite.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, not {max_norm!r}")
    if not isfinite(norm):
        raise FloatingPointError(f"the gradients' norm is {norm}")
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)
