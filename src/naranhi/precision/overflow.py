"""Find the operation in which values stop being finite."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NonFinite(NamedTuple):
    """Where infinity or NaN first appears.

    Attributes:
        module: the name of the module, as in `named_modules`.
        operation: the operation of torch, such as "aten.mm.default".
        kind: "inf" or "nan".
        largest: the largest magnitude among the operation's floating-point inputs.
    """

    module: str
    operation: str
    kind: str
    largest: float


def first_nonfinite(module: nn.Module, *inputs: Any) -> NonFinite | None:
    """Run a forward, and return the first operation that turns finite inputs into inf or NaN.

    The answer names the innermost module that is being called. An operation of a module's own
    forward, such as the addition of a residual, is listed under that module. An operation that is
    meant to make infinities, such as the filling of an attention mask, is reported like any other.

    Args:
        module: the model; its forward runs once, without gradients.
        inputs: the arguments of the forward.

    Returns:
        The place, or None if every operation returned finite values.
    """
    watch = _Watch()
    with torch.no_grad(), ExitStack() as hooks:
        for name, child in module.named_modules():
            enter = partial(watch.enter, name)
            hooks.callback(child.register_forward_pre_hook(enter).remove)
            hooks.callback(child.register_forward_hook(watch.leave).remove)
        with watch:
            module(*inputs)
    return watch.first


class _Watch(TorchDispatchMode):
    """Record the first operation with finite inputs and an output that is not finite."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []
        self.first: NonFinite | None = None

    def enter(self, name, *_):
        self.calls.append(name)

    def leave(self, *_):
        self.calls.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if self.first is None:
            before, after = _floats((args, kwargs)), _floats(output)
            if all(_finite(x) for x in before) and not all(_finite(x) for x in after):
                kind = "nan" if any(x.isnan().any() for x in after) else "inf"
                largest = max((x.abs().max().item() for x in before), default=0.0)
                self.first = NonFinite(self.calls[-1], str(func), kind, largest)
        return output


def _floats(tree):
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel()
    ]


def _finite(tensor):
    return bool(tensor.isfinite().all())
