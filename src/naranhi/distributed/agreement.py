"""Agreement among ranks: on values that must be equal, and errors that all must raise."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

# A process group, None for the default one; or this rank's groups on several axes of a mesh, for
# all ranks of these axes. Their ranks are numbered with the first axis innermost.
Axes: TypeAlias = dist.ProcessGroup | Sequence[dist.ProcessGroup] | None


def groups_of(axes: Axes) -> list[dist.ProcessGroup]:
    """Return this rank's process group on each axis.

    Raises:
        ValueError: this rank is not a member of one of them.
    """
    several = list(axes) if isinstance(axes, Sequence) else [axes]
    groups = [group or dist.group.WORLD for group in several]
    if any(dist.get_rank(group) < 0 for group in groups):
        raise ValueError("this rank is not a member of the group")
    return groups


def from_all_ranks(value: object, group: Axes = None) -> list[Any]:
    """Return the values of all ranks of a group, by rank. Every rank of the group calls this.

    Args:
        value: this rank's value, which can be pickled.
        group: the process group, or several axes; None is the default group.

    Raises:
        ValueError: this rank is not a member of the group.
    """
    values = [value]
    for axis in groups_of(group):
        gathered = [None] * dist.get_world_size(axis)
        dist.all_gather_object(gathered, values, group=axis)
        values = [value for row in gathered for value in row]
    return values


def raise_on_all(
    function: Callable[[], Result],
    group: Axes = None,
    *,
    errors: tuple[type[Exception], ...] = (Exception,),
    kind: type[Exception] = RuntimeError,
) -> Result:
    """Return the result of `function()`, or raise on all ranks of a group if it fails on any.

    So no rank waits for a rank that has failed. Every rank of the group calls this.

    Args:
        function: what each rank does by itself.
        group: the process group, or several axes; None is the default group.
        errors: the errors of `function` that are raised on all ranks; others only where they occur.
        kind: what is raised instead.

    Raises:
        kind: `function` raised one of `errors` on some rank. Raised on every rank, with one line
            for each distinct error; the line names its ranks, unless all ranks raised it.
        ValueError: this rank is not a member of the group; `function` was not called.
    """
    groups = groups_of(group)
    result = message = None
    try:
        result = function()
    except errors as error:
        # What Python raises for itself (KeyError: 'w') says nothing without its type.
        plain = isinstance(error, (kind, OSError, ValueError)) and str(error)
        message = plain or f"{type(error).__name__}: {error}"
    messages = from_all_ranks(message, groups)
    if not any(messages):
        return result
    lines = []
    for message in dict.fromkeys(filter(None, messages)):
        ranks = [rank for rank, other in enumerate(messages) if other == message]
        everywhere = len(ranks) == len(messages)
        lines.append(message if everywhere else f"on rank {', '.join(map(str, ranks))}: {message}")
    raise kind("\n".join(lines))


def agree(group: Axes = None, **things: object) -> None:
    """Compare values across the ranks of a group. Every rank of the group calls this.

    Args:
        group: the ranks to compare, a group or several axes; None is the default group.
        **things: the values by name: anything that can be pickled and compared, or a tensor or a
            module, of which only the `fingerprint` is sent.

    Raises:
        ValueError: a value differs; raised on every rank, with the name of the value and the global
            ranks of two ranks that differ. Or: this rank is not a member of the group.
    """
    large = torch.Tensor, torch.nn.Module
    local = {
        name.replace("_", " ") if name.isidentifier() else name: value
        if not isinstance(value, large)
        else _Fingerprint(fingerprint(value))
        for name, value in things.items()
    }
    gathered = from_all_ranks((dist.get_rank(), local), group)
    first, reference = gathered[0]
    for rank, other in gathered:
        for name in {**reference, **other}:
            expected, given = reference.get(name), other.get(name)
            # A NaN differs from itself, but its pickle does not.
            if expected != given and pickle.dumps(expected) != pickle.dumps(given):
                if isinstance(expected, _Fingerprint) and isinstance(given, _Fingerprint):
                    raise ValueError(f"rank {first} and rank {rank} have different {name}")
                raise ValueError(f"{name}: {expected} on rank {first}, {given} on rank {rank}")


class _Fingerprint(str):
    """The fingerprint of a value that is too large to send."""


def fingerprint(value: torch.Tensor | torch.nn.Module) -> str:
    """Return a digest of every bit of a tensor, or of a module's parameters and buffers.

    Names, shapes and dtypes are part of the digest; on the meta device, where tensors have no
    values, they are the whole digest. Equal values have equal digests on any other device.
    """
    digest = hashlib.sha256()
    tensors = (
        {"": value}
        if isinstance(value, torch.Tensor)
        else dict([*value.named_parameters(), *value.named_buffers()])
    )
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.is_meta:
            continue
        tensor = tensor.detach().resolve_conj().resolve_neg()
        digest.update(bytes_of(tensor).cpu().numpy())
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements one after the other as uint8: its own memory, or else a copy."""
    flat = tensor.reshape(-1).contiguous()
    if flat.numel() < 2:  # which is contiguous with any stride, and `view` wants a stride of 1
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)
