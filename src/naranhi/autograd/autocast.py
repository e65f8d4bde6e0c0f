"""Autocast belongs to forwards: a backward has the dtypes that its forward has chosen."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch


def without_autocast() -> AbstractContextManager[object]:
    """Return a context for a backward, which has no autocast.

    Under autocast a backward would also cast what its forward has computed in full precision, in
    a block with `autocast(enabled=False)`.

    Source: "Automatic mixed precision package" in torch's documentation: "Backward passes under
    autocast are not recommended."
    """
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return nullcontext()
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
