"""What a module takes and gives back: tensors in nested tuples, lists, dicts and dataclasses."""

from copy import copy
from dataclasses import fields, is_dataclass

import torch


class _AfterBackward(torch.autograd.Function):
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


def _map(function, value):
    """The same nest with function(tensor) for each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        new = {key: _map(function, one) for key, one in value.items()}
        return new if type(value) is dict else type(value)(new)
    if isinstance(value, tuple | list):
        new = [_map(function, one) for one in value]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if _of_fields(value):
        new = copy(value)
        for field in fields(value):
            if hasattr(value, field.name):  # also where it is frozen
                object.__setattr__(new, field.name, _map(function, getattr(value, field.name)))
        return new
    return value


def _of_fields(value):
    return is_dataclass(value) and not isinstance(value, type)


def _to_bf16(tensor):
    return tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor


def _to_fp32(tensor):
    return tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor
