"""What several ranks have to agree on: values that must be equal, errors that all must raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


def from_all_ranks(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, by rank. Every rank of the group calls this.

    Args:
        value: this rank's value, which can be pickled.
        group: the process group; None is the default group.
    """
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def raise_on_all(
    function: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    *,
    errors: tuple[type[Exception], ...] = (Exception,),
    kind: type[Exception] = RuntimeError,
) -> Result:
    """Return what `function()` returns, if it returns on every rank of a group.

    No rank waits for a rank that has left. Every rank of the group calls this.

    Args:
        function: what each rank does by itself.
        group: the process group; None is the default group.
        errors: the errors of `function` that are raised on all ranks; others only where they are.
        kind: what is raised instead.

    Raises:
        kind: `function` raised one of `errors` on some rank. Raised on every rank, with one line
            for each distinct error that names its ranks, unless these are all.
    """
    result = message = None
    try:
        result = function()
    except errors as error:
        # What Python raises for itself (KeyError: 'w') says nothing without its type.
        plain = isinstance(error, (kind, OSError, ValueError)) and str(error)
        message = plain or f"{type(error).__name__}: {error}"
    messages = from_all_ranks(message, group)
    if not any(messages):
        return result
    lines = []
    for message in dict.fromkeys(filter(None, messages)):
        ranks = [rank for rank, other in enumerate(messages) if other == message]
        everywhere = len(ranks) == len(messages)
        lines.append(message if everywhere else f"on rank {', '.join(map(str, ranks))}: {message}")
    raise kind("\n".join(lines))


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
    local = {
        name.replace("_", " "): value
        if not isinstance(value, large)
        else _Fingerprint(fingerprint(value))
        for name, value in things.items()
    }
    gathered = from_all_ranks(local, group)
    first = dist.get_global_rank(group, 0)
    for place, other in enumerate(gathered):
        for name in {**gathered[0], **other}:
            expected, given = gathered[0].get(name), other.get(name)
            if expected != given:
                rank = dist.get_global_rank(group, place)
                if isinstance(expected, _Fingerprint) and isinstance(given, _Fingerprint):
                    raise ValueError(f"rank {first} and rank {rank} have different {name}")
                raise ValueError(f"{name}: {expected} on rank {first}, {given} on rank {rank}")


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
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()
