"""Torch's modes that see each operation, as far as hooks must not be seen by them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

SELECTIVE = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


def unseen_by_checkpoints() -> AbstractContextManager[object]:
    """Return a context in which no selective checkpoint sees the operations.

    Such a checkpoint (`torch.utils.checkpoint.create_selective_checkpoint_contexts`) numbers the
    operations of a forward, and when it recomputes it takes some results from what it has kept.
    Hooks that gather parameters do not always do in a recomputation what they did in the forward.
    """
    if torch._C._len_torch_dispatch_stack() and any(
        isinstance(mode, SELECTIVE) for mode in _get_current_dispatch_mode_stack()
    ):
        return _disable_current_modes()
    return nullcontext()
