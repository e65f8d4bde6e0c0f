"""Transforms of torch.func, as far as hooks need to know about them."""

from __future__ import annotations

import torch
from torch._C import _functorch


def transforms() -> bool:
    """Return whether a transform is running: `torch.vmap`, or one of `torch.func`."""
    return bool(_functorch.get_interpreter_stack())


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that running transforms have wrapped, whose memory can be asked for."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def differentiates() -> bool:
    """Return whether a transform that takes gradients is running, such as `torch.func.grad`.

    Such a transform returns gradients and leaves `.grad` alone, so there is nothing to sum over
    ranks; and it allows no hooks that would detect the end of a backward. (`vmap` alone allows
    them, and has an ordinary backward; `jvp` has none.)
    """
    stack = _functorch.get_interpreter_stack() or ()
    return any(one.key() == _functorch.TransformType.Grad for one in stack)
