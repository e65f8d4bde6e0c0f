"""Transforms of torch.func, as far as hooks need to know about them."""

from __future__ import annotations

from torch._C import _functorch


def differentiates() -> bool:
    """Return whether a transform that differentiates is running, such as `torch.func.grad`.

    Such a transform returns gradients and leaves `.grad` alone, so there is nothing to sum over
    ranks; and it allows no hooks that would detect the end of a backward. (`vmap` alone allows
    them, and has an ordinary backward.)
    """
    stack = _functorch.get_interpreter_stack() or ()
    return any(one.key() == _functorch.TransformType.Grad for one in stack)
