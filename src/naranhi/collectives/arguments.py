"""Checks that a collective makes before it sends anything, and the memory of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist


def locate(group: dist.ProcessGroup | None, root: int = 0) -> tuple[dist.ProcessGroup, int, int]:
    """Return the group (the default group for None), this rank in it, and its number of ranks.

    Raises:
        ValueError: this rank is not a member of the group, or `root` is not a rank of the group.
    """
    group = dist.group.WORLD if group is None else group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this rank is not a member of the group")
    if not isinstance(root, int) or not 0 <= root < ranks:
        raise ValueError(f"root must be a rank of the group, 0 to {ranks - 1}, not {root!r}")
    return group, rank, ranks


def writable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the tensor's own memory, outside autograd, to write messages into.

    Raises:
        ValueError: the tensor is not contiguous; the message calls it `name`.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} must be contiguous, since it is written in place")
    flat = tensor.detach().view(-1)
    if flat.is_inference() and not torch.is_inference_mode_enabled():
        # Torch writes it only in inference mode, so make a normal tensor with the same memory.
        flat = flat.new_empty(0).set_(flat.untyped_storage(), flat.storage_offset(), flat.shape)
    return flat


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements in one dimension, outside autograd; a copy if not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def expect(name: str, tensor: object, shape: Sequence[int], like: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` has this shape, and the dtype and device of `like`."""
    wanted = (tuple(shape), like.dtype, like.device)
    if not isinstance(tensor, torch.Tensor):
        kind = "None" if tensor is None else f"a {type(tensor).__name__}"
        raise ValueError(f"{name} must be a tensor of shape {wanted[0]} here, not {kind}")
    given = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if given == wanted:
        return
    for what, value, other in zip(("shape", "dtype", "device"), given, wanted, strict=True):
        if value != other:
            raise ValueError(f"{name} must have {what} {other}, not {value}")


def expect_none(name: str, tensor: object) -> None:
    """Raise ValueError unless `tensor` is None, as it must be on a rank that is not the root."""
    if tensor is not None:
        raise ValueError(f"only the root passes {name}: pass None on all other ranks")


def require_sum(tensor: torch.Tensor) -> None:
    """Raise TypeError if torch cannot add tensors of this dtype on this device."""
    if not _has_sum(tensor.dtype, tensor.device):
        raise TypeError(f"torch cannot add tensors of {tensor.dtype} on {tensor.device}")


@cache
def _has_sum(dtype, device):
    """Return whether torch can add such tensors; cached, because trying takes time on a GPU."""
    element = torch.empty(1, dtype=dtype, device=device)
    try:
        torch.add(element, element)
    except RuntimeError:
        return False
    return True
