"""A stand-in for a gradient that is not where torch would look for it.

Under ZeRO, `.grad` of a parameter cannot hold the gradient once it is reduced: each rank has only a
shard of the sum. With None in `.grad`, `torch.nn.utils.clip_grad_norm_` would return a norm of 0.0
and clip nothing, silently. The stand-in in `.grad` has the shape, dtype and device of a gradient,
takes no memory, and raises an error when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch


def sharded_gradient(param: torch.Tensor, name: str) -> Elsewhere:
    """Return the stand-in for the gradient of a parameter, whose sum is in shards on the ranks."""
    return Elsewhere(
        param,
        f"the gradient of parameter {name} is summed and sharded over the ranks: use "
        "clip_grad_norm_() or shard_gradients() of Zero for it, and step() or zero_grad() before "
        "another backward (a forward that takes gradients itself has one: run all of a step's "
        "micro-batches in no_sync())",
    )


def unset_gradient(piece: torch.Tensor) -> Elsewhere:
    """Return the stand-in for the gradient of an optimizer's parameter, which `Zero.step` sets."""
    return Elsewhere(
        piece,
        "the gradient of this shard is set by Zero: call step() and zero_grad() of Zero, not the "
        "optimizer's, clip by clip_grad_norm_() of Zero, and scale a loss by "
        "naranhi.precision.LossScaler, not GradScaler",
    )


class Elsewhere(torch.Tensor):
    """A tensor without memory, on which any operation raises RuntimeError(text).

    Args:
        parameter: The parameter whose shape, dtype and device the stand-in has.
        text: The error message.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, text: str) -> Elsewhere:
        """Create a tensor that has the parameter's metadata and no storage."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        self.text = text
        return self

    __torch_function__: Callable[..., Any] = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        first = next(arg for arg in _flat((args, kwargs or {})) if isinstance(arg, cls))
        raise RuntimeError(first.text)

    def __repr__(self, **options: Any) -> str:
        return f"<{self.text}>"


def _flat(value):
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for item in value:
        yield from _flat(item)
