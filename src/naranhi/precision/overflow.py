"""Find the operation in which values stop being finite."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from math import isfinite, isnan
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that return uninitialized memory, whose values mean nothing.
UNINITIALIZED = {
    f"aten.{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"),
        *("new_empty_strided", "resize_", "resize_as_"),
    )
}
# Operations in place that overwrite all of `self`, whatever it was before.
OVERWRITING = {
    f"aten.{name}_"
    for name in (
        *("copy", "fill", "zero", "_foreach_copy", "_foreach_zero", "bernoulli", "cauchy"),
        *("exponential", "geometric", "log_normal", "normal", "random", "uniform"),
    )
}


class NonFinite(NamedTuple):
    """Where infinity or NaN first appears.

    Attributes:
        module: the name of the module, as in `named_modules`.
        operation: the operation of torch, such as "aten.mm.default".
        kind: "inf" or "nan".
        largest: the largest magnitude among its real or complex inputs, before it ran.
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
            # The module's other hooks, and a forward that raises, are within it, too.
            hooks.callback(child.register_forward_pre_hook(enter, prepend=True).remove)
            hooks.callback(child.register_forward_hook(watch.leave, always_call=True).remove)
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
        if self.first or str(func.overloadpacket) in UNINITIALIZED:
            return func(*args, **(kwargs or {}))
        # Inputs that are read, without those that are only written; before the call, because an
        # in-place operation overwrites an input.
        arguments = func._schema.arguments
        given = dict(zip((one.name for one in arguments), args, strict=False)) | (kwargs or {})
        written = {one.name for one in arguments if _is_written(one) and one.name in given}
        outs = {one.name for one in arguments if one.is_out}
        only_written = written if str(func.overloadpacket) in OVERWRITING else outs
        before = _largest([value for name, value in given.items() if name not in only_written])
        output = func(*args, **(kwargs or {}))
        # Some operations return None, such as in-place ones on lists of tensors.
        after = _largest([given[name] for name in written] if output is None else output)
        if all(map(isfinite, before)) and not all(map(isfinite, after)):
            kind = "nan" if any(map(isnan, after)) else "inf"
            self.first = NonFinite(self.calls[-1], str(func), kind, max(before, default=0.0))
        return output


def _is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def _largest(tree):
    """Return the largest magnitude of each tensor in a tree, which is NaN if any element is."""
    tensors = [_values(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [
        _real(tensor).abs().max().item()
        for tensor in tensors
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()
    ]


def _values(tensor):
    """Return the stored values of a tensor; those that a sparse tensor leaves out are 0."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor if tensor.layout is torch.strided else tensor.values()


def _real(tensor):
    """Return a tensor with which torch can compute: of real and imaginary parts; fp8 in fp32."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.itemsize == 1 else tensor
