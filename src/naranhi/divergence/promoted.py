"""Run a model in another dtype although its loss takes targets in the old one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map


class Promoted(TorchFunctionMode):
    """A mode that casts the tensors of a function of `torch.nn.functional` if their dtypes differ.

    Some losses, such as `binary_cross_entropy` and `huber_loss`, refuse an output in float64 with a
    target in float32.

    Args:
        dtype: what floating-point tensors are cast to; None to leave them as they are.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.dtype is not None and _is_of_functional(function):
            mixed = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_floating(leaf)}
            if len(mixed) > 1:
                args, kwargs = cast((args, kwargs), self.dtype)
        return function(*args, **kwargs)


def cast(arguments: Any, dtype: torch.dtype) -> Any:
    """Return arguments with the floating-point tensors among them in another dtype."""
    return tree_map(lambda leaf: leaf.to(dtype) if _is_floating(leaf) else leaf, arguments)


def _is_of_functional(function):
    name = getattr(function, "__name__", "")
    return getattr(F, name, None) is function


def _is_floating(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
