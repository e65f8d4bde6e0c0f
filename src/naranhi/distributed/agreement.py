"""Values that must be equal on several ranks, compared before anything depends on them."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist


def agree(group: dist.ProcessGroup | None = None, **things: object) -> None:
    """Compare values across the ranks of a group. Every rank of the group calls this.

    Args:
        group: the ranks to compare; None is the default group.
        **things: the values by name: anything that can be pickled and compared, or a tensor or a
            module, of which only the `fingerprint` is sent.

    Raises:
        ValueError: a value differs; raised on every rank, with the name of the value and the global
            ranks of two ranks that differ.
    """
    group = dist.group.WORLD if group is None else group
    large = torch.Tensor, torch.nn.Module
    mine = {
        name.replace("_", " "): one
        if not isinstance(one, large)
        else _Fingerprint(fingerprint(one))
        for name, one in things.items()
    }
    told = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    first = dist.get_global_rank(group, 0)
    for place, other in enumerate(told):
        for name in {**told[0], **other}:
            one, two = told[0].get(name), other.get(name)
            if one != two:
                rank = dist.get_global_rank(group, place)
                if isinstance(one, _Fingerprint) and isinstance(two, _Fingerprint):
                    raise ValueError(f"rank {first} and rank {rank} have different {name}")
                raise ValueError(f"{name}: {one} on rank {first}, {two} on rank {rank}")


class _Fingerprint(str):
    """The fingerprint of a value that is too large to send."""


def fingerprint(value: torch.Tensor | torch.nn.Module) -> str:
    """Return a digest of every bit of a tensor, or of a module's parameters and buffers.

    Names, shapes and dtypes are part of the digest. Equal values have equal digests on any device.
    """
    digest = hashlib.sha256()
    tensors = (
        {"": value}
        if isinstance(value, torch.Tensor)
        else dict([*value.named_parameters(), *value.named_buffers()])
    )
    for name, one in tensors.items():
        digest.update(f"{name} {tuple(one.shape)} {one.dtype}".encode())
        digest.update(one.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()
