"""What has to be the same on several ranks, compared before anything depends on it."""

import hashlib

import torch
import torch.distributed as dist


def agree(group=None, **things):
    """Compare things across the ranks of a group (None: the default one), all of which call this.

    things: by name, anything that pickles and compares; or a tensor or a module, of which only the
    `fingerprint` travels.
    Raises ValueError on every rank where one differs; it names that, and two ranks of the world.
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
    """One that stands for something too large to be told."""


def fingerprint(value):
    """A digest of every bit of a tensor, or of a module's parameters and buffers, and their names,
    shapes and dtypes: equal for equal values, on whatever device."""
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
