"""Function calls as autograd sees them: tensors in, tensors out, whatever pytrees hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from naranhi.autograd.containers import is_dataclass_object, map_tensors, tensors_of

ALONE = object()  # the structure of a value that is a tensor, without any container
CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class Call:
    """A function call that can be run again on different tensors.

        call, tensors = Call.of(function, args, kwargs)
        outputs = call([tensor.detach() for tensor in tensors])  # a tuple of tensors
        result = call.result(outputs)                            # what the function returned

    Arguments and results are pytrees: tensors, or tuples, lists, dicts and dataclasses that contain
    tensors. A tensor that occurs several times stays one tensor, so `key is query` keeps its value.
    Other arguments are passed on unchanged.
    """

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
    ) -> tuple[Call, list[torch.Tensor]]:
        """Return the call, and the tensors in its arguments, which the call does not keep.

        Args:
            function: the function to call.
            args: its positional arguments.
            kwargs: its keyword arguments.
            name: the function's name in errors; by default its own, or that of its type.
        """
        call = cls()
        call.function = function
        call.name = name or getattr(function, "__name__", type(function).__name__)
        # One argument is the usual case, and a single tensor needs no container around it.
        call._is_single = len(args) == 1 and not kwargs
        tensors, call._arguments = take_apart(args[0] if call._is_single else (args, kwargs))
        return call, tensors

    def __call__(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the function on these tensors in place of those in its arguments.

        Raises:
            TypeError: if the result contains no tensor, or an object that may hide one.
        """
        arguments = put_together(self._arguments, tensors)
        args, kwargs = ((arguments,), {}) if self._is_single else arguments
        result = self.function(*args, **kwargs)
        self._require_tensors(result)
        outputs, self._result = take_apart(result)
        return tuple(outputs)

    def result(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Return the function's last result with these tensors in place of its own."""
        return put_together(self._result, outputs)

    def _require_tensors(self, result):
        kinds = [type(leaf) for leaf in _leaves(result)]
        hidden = next(
            (kind for kind in kinds if not issubclass(kind, (torch.Tensor, *CONSTANTS))), None
        )
        if hidden or not any(issubclass(kind, torch.Tensor) for kind in kinds):
            what = (hidden or type(result)).__name__
            raise TypeError(
                f"{self.name} returned {what}, not a tensor or tensors in tuples, "
                "lists, dicts or dataclasses"
            )


def take_apart(value: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors in a pytree, each once, and the pytree with placeholders for them."""
    if isinstance(value, torch.Tensor):
        return [value], ALONE
    tensors = list({id(tensor): tensor for tensor in tensors_of(value)}.values())
    places = {}
    for number, tensor in enumerate(tensors):
        places[id(tensor)] = place = torch.empty(0)
        place.number = number
    return tensors, map_tensors(lambda tensor: places[id(tensor)], value)


def put_together(nest: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a pytree that `take_apart` took apart, with these tensors for its placeholders."""
    return tensors[0] if nest is ALONE else map_tensors(lambda place: tensors[place.number], nest)


def _leaves(value):
    """Return all leaves of tuples, lists, dicts and dataclasses, tensors or not."""
    if is_dataclass_object(value):
        value = [
            getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)
        ]
    elif isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, tuple | list):
        return [value]
    return [leaf for item in value for leaf in _leaves(item)]
