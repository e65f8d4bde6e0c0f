"""Buckets: lists of tensors, each of which is sent as one flat tensor."""

from collections.abc import Sequence

import torch

BUCKET = 25 * 2**20  # bytes, torch's own default


def buckets(
    tensors: Sequence[torch.Tensor], bucket_bytes: int = BUCKET
) -> list[list[torch.Tensor]]:
    """Group tensors into buckets of at most `bucket_bytes`, from the last tensor to the first.

    The last tensor comes first, because a backward pass reaches the last layers first.

    Args:
        tensors: tensors of any dtypes and devices.
        bucket_bytes: the largest size of a bucket. A larger tensor gets its own bucket.

    Returns:
        The buckets. All tensors of a bucket have the same dtype and device.

    Raises:
        ValueError: `bucket_bytes` is not positive.
    """
    if not bucket_bytes > 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes!r}")
    full, filling = [], {}
    for tensor in reversed(tensors):
        bucket = filling.setdefault((tensor.dtype, tensor.device), [])
        if bucket and sum(member.nbytes for member in bucket) + tensor.nbytes > bucket_bytes:
            full.append(bucket)
            bucket = filling[tensor.dtype, tensor.device] = []
        bucket.append(tensor)
    return full + list(filling.values())


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of a bucket, copied into one tensor of one dimension."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of `flat` back into the tensors, in place: the inverse of `pack`."""
    for tensor, piece in zip(
        tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.detach().copy_(piece.view(tensor.shape))
