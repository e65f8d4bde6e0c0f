"""Autocast belongs in forwards: a backward uses the dtypes that its forward chose."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch


def has_autocast(kind: str) -> bool:
    """Return whether autocast is on for devices of this type; "meta", say, does not support it."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors in the dtype in which autocast multiplies them, and anything else unchanged.

    Autocast casts the arguments of an operation when it is called. So it casts neither the inputs
    of a `torch.autograd.Function` nor tensors that its forward sends, or multiplies with `out=`.
    """
    return tuple(x.to(autocast_dtype(x)) if isinstance(x, torch.Tensor) else x for x in tensors)


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which autocast multiplies a tensor: without autocast, its own."""
    kind = x.device.type
    if not has_autocast(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(kind)


def without_autocast(*kinds: str) -> AbstractContextManager[object]:
    """Return a context that turns autocast off on devices of these types, for a backward.

    Under autocast a backward would also cast tensors that its forward computed in full precision
    in a block with `autocast(enabled=False)`.

    Args:
        *kinds: types of devices, such as "cpu".

    Source: "Automatic mixed precision package" in torch's documentation: "Backward passes under
    autocast are not recommended."
    """
    enabled = [kind for kind in kinds if has_autocast(kind)]
    if not enabled:
        return nullcontext()
    stack = ExitStack()
    for kind in enabled:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
