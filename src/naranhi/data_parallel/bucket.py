"""One bucket of gradients: a flat buffer, summed over the ranks by one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


class GradientBucket:
    """The gradients of some parameters in one flat buffer, followed by flags that travel with them.

    Two flags per parameter: it has a gradient, and it lacks one. If both sums are above 0, the
    ranks differ. One more flag for the whole bucket: the backward has failed.

    Args:
        parameters: The parameters whose gradients share this bucket, of one dtype and device.
    """

    flat: torch.Tensor
    views: dict[nn.Parameter, torch.Tensor]
    flags: torch.Tensor
    notes: torch.Tensor
    awaited: set[nn.Parameter]
    work: dist.Work | None

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        sizes = [param.numel() for param in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes) + 2 * len(sizes) + 1)
        *pieces, self.notes = self.flat.split([*sizes, 2 * len(sizes) + 1])
        flags, self._failed = self.notes.split([2 * len(sizes), 1])
        self.views = {
            # A fused optimizer ignores strides, so a gradient must have those of its parameter.
            param: piece.as_strided(param.shape, strides_of(param))
            for param, piece in zip(parameters, pieces, strict=True)
        }
        self.flags = flags.view(2, -1)
        self.awaited, self.work = set(), None

    def start(self, group: dist.ProcessGroup | None, failed: bool = False) -> None:
        """Start the all-reduce of the bucket.

        Args:
            group: The process group; None for the default one.
            failed: Whether this rank's backward has failed.
        """
        # The slot of a missing gradient is summed as well, and ignored.
        has = [param.grad is not None for param in self.views]
        if len(set(has)) == 1:
            self.flags[0].fill_(has[0])
            self.flags[1].fill_(not has[0])
        else:  # a copy from host memory: the CPU waits until the GPU reaches it
            self.flags.copy_(torch.tensor([has, [not flag for flag in has]]))
        self._failed.fill_(failed)
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)


def read_flags(buckets: Sequence[GradientBucket]) -> tuple[bool, bool]:
    """Read the flags of buckets whose all-reduces are complete.

    From a GPU the flags come in one copy, for which the CPU waits.

    Returns:
        Whether all ranks had gradients of the same parameters, and whether the backward of any rank
        has failed.
    """
    kinds = {}
    for bucket in buckets:
        kinds.setdefault((bucket.flat.dtype, bucket.flat.device), []).append(bucket)
    alike, failed = True, False
    for some in kinds.values():
        numbers = iter(torch.cat([bucket.notes for bucket in some]).real.tolist())
        for bucket in some:
            has, lacks = ([next(numbers) for _ in bucket.views] for _ in range(2))
            alike &= not any(map(min, has, lacks))
            failed |= next(numbers) > 0
    return alike, failed


def strides_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the strides of a gradient: the parameter's, if its memory has no gaps or overlaps."""
    return torch.empty_like(parameter, device="meta").stride()
