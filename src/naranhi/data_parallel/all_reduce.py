"""Sum gradients after the backward: one parameter after the other, or in few long messages.

`all_reduce_gradients` and `all_reduce_bucketed` use our own ring. Gradients must be None before the
first backward of a step (`optimizer.zero_grad()`); otherwise the sums of an earlier step are summed
again.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020),
for buckets in reverse order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from naranhi.collectives import all_reduce
from naranhi.collectives.buckets import BUCKET, buckets, pack, unpack
from naranhi.data_parallel.supported import require_replicas, require_unsummed
from naranhi.data_parallel.sync import with_gradient
from naranhi.distributed import device_of


def global_count(count: int, group: dist.ProcessGroup | None = None) -> int:
    """Return how many items are valid in the whole step: the sum of the ranks' `count`.

    Args:
        count: How many items (tokens, rows, ...) are valid on this rank in this step.
        group: The process group; None for the default one.

    Raises:
        ValueError: On every rank, if the sum is 0: there is no loss to average.
    """
    group = group or dist.group.WORLD
    total = torch.tensor([count], device=device_of(group))
    all_reduce(total, group)
    if not (valid := total.item()):
        raise ValueError("`count` is 0 on every rank in this step: there is no loss to average")
    return valid


def all_reduce_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sum each parameter's gradient over the ranks, in place, one parameter after the other.

    Args:
        model: This rank's replica, after its backward.
        group: The process group; None for the default one.

    Raises:
        RuntimeError: On every rank, before any gradient is summed, if a parameter has a gradient on
            some ranks only; it names the parameter and the ranks.
            Also if a parameter belongs to a `DDP` or `Zero`, which sums its gradient.
        TypeError: On every rank, before any gradient is summed, if a gradient is sparse; it names
            the parameter and the ranks. Also, on ranks that see it, if ranks of the group hold
            different shards of a layer, or ranks outside it hold experts or copies of them.
    """
    require_unsummed(model)
    require_replicas(model, group)
    for parameter in with_gradient(model, group):
        summed = parameter.grad.resolve_conj().resolve_neg().contiguous()
        all_reduce(summed, group, algorithm="ring")
        if summed is not parameter.grad:  # .grad keeps its strides, for fused optimizers
            parameter.grad.copy_(summed)


def all_reduce_bucketed(
    model: nn.Module, group: dist.ProcessGroup | None = None, bucket_bytes: int = BUCKET
) -> None:
    """Do the same as `all_reduce_gradients` in fewer, longer messages.

    Args:
        model: This rank's replica, after its backward.
        group: The process group; None for the default one.
        bucket_bytes: The largest size of a bucket, in bytes; a larger gradient gets its own
            bucket. One all-reduce sums a bucket. The default is torch's, 25 MiB.

    Raises:
        RuntimeError: As in `all_reduce_gradients`.
        TypeError: As in `all_reduce_gradients`.
        ValueError: If `bucket_bytes` is not above 0.
    """
    require_unsummed(model)
    require_replicas(model, group)
    for bucket in buckets(with_gradient(model, group), bucket_bytes):
        gradients = [parameter.grad for parameter in bucket]
        flat = pack(gradients)
        all_reduce(flat, group, algorithm="ring")
        unpack(flat, gradients)
