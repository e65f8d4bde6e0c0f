"""What a collective refuses before it sends anything, and the memory that its messages use."""

import torch
import torch.distributed as dist


def locate(group, root=0):
    """Return the group, this rank in it, and its number of ranks."""
    group = dist.group.WORLD if group is None else group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this rank is not a member of the group")
    if not isinstance(root, int) or not 0 <= root < ranks:
        raise ValueError(f"root must be a rank of the group, 0 to {ranks - 1}, not {root!r}")
    return group, rank, ranks


def writable(name, tensor):
    """Return the tensor's own memory in one dimension, outside autograd, to write messages into."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} must be contiguous, since it is written in place")
    return tensor.detach().view(-1)


def readable(tensor):
    """Return the tensor's values in one dimension, outside autograd; a copy if not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def expect(name, tensor, shape, like):
    """Raise ValueError unless this is a tensor of that shape, dtype and device of `like`."""
    wanted = (tuple(shape), like.dtype, like.device)
    if not isinstance(tensor, torch.Tensor):
        kind = "None" if tensor is None else f"a {type(tensor).__name__}"
        raise ValueError(f"{name} must be a tensor of shape {wanted[0]} here, not {kind}")
    found = (tuple(tensor.shape), tensor.dtype, tensor.device)
    for what, one, other in zip(("shape", "dtype", "device"), found, wanted, strict=True):
        if one != other:
            raise ValueError(f"{name} must have {what} {other}, not {one}")


def expect_none(name, tensor):
    """Raise ValueError for a tensor that only the root has."""
    if tensor is not None:
        raise ValueError(f"{name} is the root's alone: pass None on the other ranks")


def require_sum(tensor):
    """Raise TypeError for a dtype that torch cannot add on this device."""
    one = tensor.new_empty(1)
    try:
        torch.add(one, one)
    except RuntimeError as error:
        raise TypeError(f"{tensor.dtype} has no sum on {tensor.device}") from error
