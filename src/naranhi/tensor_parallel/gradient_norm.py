"""The norm of all gradients of a model of which each rank has a part, and clipping to it.

Every parameter counts once. What the ranks of a tensor-parallel group hold in parts is summed over
that group, which the modules name (`splits` and `group`); what they hold whole is not. Copies of a
tied parameter count on one rank. Replicas have equal gradients, over which nothing is summed.
"""

from collections.abc import Iterable, Sequence
from math import inf, isfinite

import torch
import torch.distributed as dist
from torch import nn

from naranhi.collectives import all_gather
from naranhi.tensor_parallel.sequence_gradients import unsummed
from naranhi.tensor_parallel.shards import ShardedModule


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    counted_elsewhere: Iterable[nn.Parameter] = (),
) -> float:
    """Scale gradients in place to a norm of at most `max_norm`, and return the norm they had.

    The norm is that of the whole model, as `torch.nn.utils.clip_grad_norm_` has it in one process.
    Unlike that, this raises where the norm is not finite: scaled by it, all would be zeros or NaN.

    model: this rank's part; its layers may be tensor-parallel. Call it on every rank, when all sums
    of the step are done (of replicas, tied copies, sequence parallelism).
    groups: those over whose ranks the model is spread otherwise, such as a pipeline's.
    counted_elsewhere: parameters of this rank that count on another, such as later tied copies.

    Raises ValueError for a `max_norm` or `norm_type` that is not above 0; RuntimeError where
    `sum_sequence_gradients` has not been called yet; FloatingPointError on every rank, before
    anything is scaled, for a norm that is not finite.
    """
    if names := unsummed(model):
        raise RuntimeError(
            f"the gradient of {names[0]} is this rank's part of a sum: call "
            "sum_sequence_gradients before clipping"
        )
    split, gradients = split_over(model), [p.grad for p in model.parameters() if p.grad is not None]
    skipped = set(counted_elsewhere)
    parts = {None: [], **{group: [] for group in split.values()}}
    for parameter in model.parameters():
        if parameter.grad is not None and parameter not in skipped:
            parts[split.get(parameter)].append(parameter.grad)
    device = next((parameter.device for parameter in model.parameters()), None)
    norm = norm_of_parts(parts, norm_type, groups, device)
    scale_to(gradients, max_norm, norm)
    return norm


def split_over(model: nn.Module) -> dict[nn.Parameter, dist.ProcessGroup]:
    """Return the parameters of which each rank of a group holds a part, with that group."""
    return {
        getattr(module, name): module.group
        for module in model.modules()
        if isinstance(module, ShardedModule)
        for name in module.splits
    }


def norm_of_parts(
    parts: dict[dist.ProcessGroup | None, list[torch.Tensor]],
    norm_type: float,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | None = None,
) -> float:
    """Return the norm of gradients that are spread over the ranks of `groups`.

    parts: this rank's gradients, by the group of which each rank has another part of them; those
    under None are whole.
    """
    total = norm_power(parts[None], norm_type, device)
    for group, tensors in parts.items():
        if group is not None:
            total = _add(
                total,
                over_ranks(norm_power(tensors, norm_type, device), norm_type, group),
                norm_type,
            )
    for group in groups:
        total = over_ranks(total, norm_type, group)
    return (total if norm_type == inf else total.pow(1 / norm_type)).item()


def norm_power(
    tensors: Sequence[torch.Tensor], norm_type: float = 2.0, device: torch.device | None = None
) -> torch.Tensor:
    """Return what these tensors add to the norm of all: a tensor of one float64, to be summed.

    It is the sum of |x| ** norm_type over all elements x; for norm_type inf it is the largest |x|,
    of which the largest is to be taken instead of the sum. Any mix of dtypes, complex ones too.
    float64, since the square of a norm in float32 may exceed float32. device: of the result where
    there are no tensors.
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


def _add(power, other, norm_type):
    return torch.maximum(power, other) if norm_type == inf else power + other


def over_ranks(power: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum (the largest, for norm_type inf) of all ranks' `norm_power`: the same bits."""
    table = power.new_empty(dist.get_world_size(group))
    all_gather(table, power, group)
    return table.max() if norm_type == inf else table.sum()


def scale_to(gradients: Iterable[torch.Tensor], max_norm: float, norm: float):
    """Scale gradients in place, whose norm over all ranks is `norm`, to at most `max_norm`."""
    if not max_norm > 0:
        raise ValueError(f"a norm is clipped to a number above 0, not to {max_norm!r}")
    if not isfinite(norm):
        raise FloatingPointError(f"the gradients' norm is {norm}")
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
