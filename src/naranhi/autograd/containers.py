"""The pytrees that a module receives and returns: tensors in tuples, lists, dicts and dataclasses.

Where tensors are replaced, a module receives copies of their containers. If the module changes such
a copy (appends a result to a list, say), its caller expects to see the change, so the change is
written back to the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

# What was copied: (container or tensor, its replacement, the replacement's items).
Copies = list[tuple[Any, Any, list[tuple[Any, Any]]]]


class AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs; runs `call` when all their gradients are there.

    Autograd runs newer nodes first, so `call` comes last in the unit's backward if
    its other nodes are newer. A cast of a weight that autocast cached in an earlier
    forward is older: call `torch.clear_autocast_cache` before each forward.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, call: Callable[[], object], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the inputs unchanged."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(
        ctx: FunctionCtx, *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Run the call, and return the gradients unchanged."""
        ctx.call()
        return None, *gradients


WATCHED = f"{AfterBackward.__name__}Backward"  # the name of its nodes


def watch_backward(call: Callable[[], None], value: Any, copies: Copies | None) -> Any:
    """Return the pytree, with tensors that require a gradient passed through `AfterBackward`."""
    inputs = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
    if not inputs:
        return value
    outputs = AfterBackward.apply(call, *inputs)
    new = dict(zip(map(id, inputs), outputs, strict=True))
    return map_tensors(lambda tensor: new.get(id(tensor), tensor), value, copies)


def put_into(inputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a graph that a module has put into containers of its watched inputs."""
    for tensor in tensors_of(inputs):
        if tensor.grad_fn is not None and tensor.grad_fn.name() != WATCHED:
            yield tensor


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a pytree of tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)
    elif is_dataclass_object(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name, None))


def map_tensors(
    function: Callable[[torch.Tensor], Any],
    value: Any,
    copies: Copies | None = None,
    empty: bool = False,
) -> Any:
    """Return the pytree with function(tensor) in place of each tensor.

    A container in which no tensor changes stays the same object. For any other container, and for
    each tensor that changes, `copies` receives (object, replacement, its items). With `empty`, a
    list or dict without items is replaced, too: a module may put tensors there.
    """
    if isinstance(value, torch.Tensor):
        new = function(value)
    elif isinstance(value, tuple):
        mapped = [map_tensors(function, item, copies, empty) for item in value]
        if all(a is b for a, b in zip(mapped, value, strict=True)):
            return value
        new = type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    else:
        items = items_of(value)
        mapped = [(key, map_tensors(function, item, copies, empty)) for key, item in items]
        is_empty = empty and not items and isinstance(value, list | dict)
        new = value if same_items(mapped, items) and not is_empty else copy(value)
        if new is not value:
            put_items(new, mapped)
    if copies is not None and new is not value:
        copies.append((value, new, items_of(new)))
    return new


def write_back(copies: Copies) -> None:
    """Apply changes made in copied containers (see `map_tensors`) to the originals as well."""
    original = {id(new): value for value, new, _ in copies}
    for value, new, items in reversed(copies):
        now = items_of(new)
        if not same_items(now, items):
            put_items(value, [(key, original.get(id(item), item)) for key, item in now])


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return [(key, value)] of a container that may change: a list, dict or dataclass; else []."""
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, list):
        return [*enumerate(value)]
    if is_dataclass_object(value):
        return [
            (field.name, getattr(value, field.name))
            for field in fields(value)
            if hasattr(value, field.name)
        ]
    return []


def put_items(value: Any, items: list[tuple[Any, Any]]) -> None:
    """Replace the content of a list, dict or dataclass with `items`."""
    if isinstance(value, dict):
        for key in value.keys() - dict(items).keys():
            del value[key]
        for key, item in items:
            value[key] = item
    elif isinstance(value, list):
        value[:] = [item for _, item in items]
    else:
        for key, item in items:
            object.__setattr__(value, key, item)  # works on frozen dataclasses, too


def same_items(items: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    """Return whether these are the same objects under the same keys."""
    return len(items) == len(other) and all(
        a == c and b is d for (a, b), (c, d) in zip(items, other, strict=True)
    )


def is_dataclass_object(value: object) -> bool:
    """Return whether the value is an instance of a dataclass."""
    return is_dataclass(value) and not isinstance(value, type)


def to_bf16(tensor: torch.Tensor) -> torch.Tensor:
    """Return an fp32 tensor in bf16, and any other tensor unchanged."""
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor


def to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bf16 tensor in fp32, and any other tensor unchanged."""
    return tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
