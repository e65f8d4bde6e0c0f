"""The norm of gradients of which each rank has a part."""

from math import inf

import torch
import torch.distributed as dist

from naranhi.collectives import all_gather


def norm_power(tensors, norm_type=2.0):
    """Return what these tensors add to the norm of all: a tensor of one float64, to be summed.

    It is the sum of |x| ** norm_type over all elements x; for norm_type inf it is the largest |x|,
    of which the largest is to be taken instead of the sum. Any mix of dtypes, complex ones too.
    float64, since the square of a norm in float32 may exceed float32.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, not {norm_type!r}")
    norms = torch.stack([_norm(tensor, norm_type).double() for tensor in tensors])
    return norms.max() if norm_type == inf else norms.pow(norm_type).sum()


def _norm(tensor, norm_type):
    small = tensor.dtype in (torch.bfloat16, torch.float16)
    return torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32 if small else None)


def total_norm(power, norm_type=2.0, group=None):
    """Return the norm, a float, of which each rank of the group has passed its `norm_power`."""
    table = power.new_empty(dist.get_world_size(group))
    all_gather(table, power, group)
    total = table.max() if norm_type == inf else table.sum().pow(1 / norm_type)
    return total.item()
