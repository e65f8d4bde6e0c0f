"""Many tensors as few: cut into lists, each of which travels as one flat piece of memory."""

import torch

BUCKET = 25 * 2**20  # bytes, torch's own choice


def buckets(tensors, bucket_bytes=BUCKET):
    """The tensors from the last to the first, in lists of one dtype and device, none of which is
    longer than `bucket_bytes`, but for a tensor that is so by itself.

    From the last, since a backward comes to the last layers first. ValueError unless the size is
    above 0.
    """
    if not bucket_bytes > 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes!r}")
    full, filling = [], {}
    for tensor in reversed(tensors):
        bucket = filling.setdefault((tensor.dtype, tensor.device), [])
        if bucket and sum(one.nbytes for one in bucket) + tensor.nbytes > bucket_bytes:
            full.append(bucket)
            bucket = filling[tensor.dtype, tensor.device] = []
        bucket.append(tensor)
    return full + list(filling.values())


def pack(tensors):
    """The values of a bucket, copied into one tensor of one dimension."""
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def unpack(flat, tensors):
    """Copy them back: the inverse of `pack`, in place."""
    for one, piece in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        one.detach().copy_(piece.view(one.shape))
