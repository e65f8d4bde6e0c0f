"""Gradients summed after the backward: one parameter after the other, or in few long messages.

Both use our own ring. Gradients are to be None before a step (`optimizer.zero_grad()`): sums of an
earlier step would be added up again.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020),
for buckets in reverse order.
"""

import torch
import torch.distributed as dist

from naranhi.collectives import all_reduce
from naranhi.collectives.buckets import BUCKET, buckets, pack, unpack
from naranhi.data_parallel.sync import with_gradient


def global_count(count, group=None):
    """How many are valid in the whole step: the sum of the ranks' own `count`, an int.

    Raises ValueError on every rank when it is 0: there is no loss to average.
    """
    group = group or dist.group.WORLD
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    total = torch.tensor([count], device=device)
    all_reduce(total, group)
    if not total.item():
        raise ValueError("no rank has anything valid in this step")
    return total.item()


def all_reduce_gradients(model, group=None):
    """Add up each parameter's gradients over the ranks, in place, one parameter after the other.

    Raises on every rank, before any is added, and names the parameter and the ranks: RuntimeError
    where a parameter has a gradient on some ranks only, TypeError where one is sparse.
    """
    for parameter in with_gradient(model, group):
        parameter.grad = parameter.grad.contiguous()
        all_reduce(parameter.grad, group, algorithm="ring")


def all_reduce_bucketed(model, group=None, bucket_bytes=BUCKET):
    """`all_reduce_gradients` in fewer, longer messages, of about `bucket_bytes` each."""
    for bucket in buckets(with_gradient(model, group), bucket_bytes):
        gradients = [parameter.grad for parameter in bucket]
        flat = pack(gradients)
        all_reduce(flat, group, algorithm="ring")
        unpack(flat, gradients)
