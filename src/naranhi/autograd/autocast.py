"""Autocast belongs to forwards: a backward has the dtypes that its forward has chosen."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch


def has_autocast(kind: str) -> bool:
    """Return whether autocast is on for devices of this type; "meta", say, has none."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(*kinds: str) -> AbstractContextManager[object]:
    """Return a context for a backward, which has no autocast on devices of these types.

    Under autocast a backward would also cast what its forward has computed in full precision, in
    a block with `autocast(enabled=False)`.

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
