"""What a module takes and gives back: tensors in nested tuples, lists, dicts and dataclasses.

A module is given copies of the containers in which tensors are replaced. If it changes one (appends
what it has found to a list, say), its caller expects that too: so it is written back.
"""

from copy import copy
from dataclasses import fields, is_dataclass

import torch


class AfterBackward(torch.autograd.Function):
    """The tensors that a unit takes, and a call when the gradients of all of them are there: in
    autograd's order that is after all else in the unit's backward."""

    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.call()
        return None, *gradients


def _watch(call, value, copies):
    """The nest with its tensors that require a gradient passed through `AfterBackward`."""
    inputs = [one for one in _tensors(value) if one.requires_grad]
    if not inputs:
        return value
    outputs = AfterBackward.apply(call, *inputs)
    new = dict(zip(map(id, inputs), outputs, strict=True))
    return _map(lambda one: new.get(id(one), one), value, copies)


def _tensors(value):
    """Those in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)
    elif _of_fields(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name, None))


def _map(function, value, copies=None):
    """The same nest with function(tensor) for each tensor. A container in which no tensor becomes
    another stays the same object; of others, `copies` gets (object, its copy, what is in that)."""
    if isinstance(value, torch.Tensor):
        new = function(value)
    elif isinstance(value, tuple):
        mapped = [_map(function, one, copies) for one in value]
        if all(a is b for a, b in zip(mapped, value, strict=True)):
            return value
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    else:
        items = _items(value)
        mapped = [(key, _map(function, one, copies)) for key, one in items]
        new = value if _same(mapped, items) else copy(value)
        if new is not value:
            _put(new, mapped)
    if copies is not None and new is not value:
        copies.append((value, new, _items(new)))
    return new


def _write_back(copies):
    """What was changed in copied containers (see `_map`) is changed in the originals as well."""
    original = {id(new): value for value, new, _ in copies}
    for value, new, items in reversed(copies):
        now = _items(new)
        if not _same(now, items):
            _put(value, [(key, original.get(id(one), one)) for key, one in now])


def _items(value):
    """[(key, what is there)] of what may be changed: a list, a dict or a dataclass; else []."""
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, list):
        return [*enumerate(value)]
    if _of_fields(value):
        return [
            (field.name, getattr(value, field.name))
            for field in fields(value)
            if hasattr(value, field.name)
        ]
    return []


def _put(value, items):
    """Let `items` be all that is in a list, dict or dataclass."""
    if isinstance(value, dict):
        for key in value.keys() - dict(items).keys():
            del value[key]
        for key, one in items:
            value[key] = one
    elif isinstance(value, list):
        value[:] = [one for _, one in items]
    else:
        for key, one in items:
            object.__setattr__(value, key, one)  # also where it is frozen


def _same(one, other):
    return len(one) == len(other) and all(
        a == c and b is d for (a, b), (c, d) in zip(one, other, strict=True)
    )


def _of_fields(value):
    return is_dataclass(value) and not isinstance(value, type)


def _to_bf16(tensor):
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor


def _to_fp32(tensor):
    return tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
