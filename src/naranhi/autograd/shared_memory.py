"""Parameters that are several objects with the same memory, as `b.data = a.data` makes them.

An optimizer in one process changes them together. Only the memory shows this, so code that copies
parameters, into shards or to other ranks, would train them separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def sharing_memory(
    named: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, str]]:
    """Yield the names of each pair of parameters that have an element in common.

    Args:
        named: (name, parameter), each parameter once. Only plain `nn.Parameter`s are compared, and
            none on the meta device, where they have no memory.
    """
    by_storage = {}
    for name, tensor in named:
        if tensor.numel() and not tensor.is_meta and type(tensor) is torch.nn.Parameter:
            storage = tensor.untyped_storage().data_ptr()
            by_storage.setdefault(storage, []).append((tensor.data_ptr(), name, tensor))
    for members in by_storage.values():
        members.sort(key=lambda member: member[0])
        for number, (_, name, tensor) in enumerate(members):
            for begin, other_name, other in members[number + 1 :]:
                if begin >= _end(tensor):
                    break
                if torch.isin(_addresses(tensor), _addresses(other)).any():
                    yield name, other_name


def _end(tensor):
    """Return the address just past a tensor's last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _addresses(tensor):
    """Return the address of each element."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + stride * torch.arange(size)
    return tensor.data_ptr() + tensor.element_size() * offsets.flatten()
