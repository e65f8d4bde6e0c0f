"""Function calls as autograd sees them: tensors in, tensors out, whatever pytrees hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from naranhi.autograd.containers import (
    Copies,
    is_dataclass_object,
    items_of,
    map_tensors,
    put_items,
    same_items,
    tensors_of,
)

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
    Other arguments are passed on unchanged. If the function changes a list, dict or dataclass among
    its arguments (appends a result, say), `result` makes the same change in the caller's: tensors
    there are outputs of the call, too.
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
        call._is_single, call._originals = len(args) == 1 and not kwargs, []
        tensors, call._arguments = take_apart(
            args[0] if call._is_single else (args, kwargs), call._originals
        )
        return call, tensors

    def __call__(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the function on these tensors in place of those in its arguments.

        Raises:
            TypeError: if the result contains no tensor, or an object that may hide one.
        """
        copies = []
        arguments = put_together(self._arguments, tensors, copies)
        args, kwargs = ((arguments,), {}) if self._is_single else arguments
        result = self.function(*args, **kwargs)
        self._require_tensors(result)
        self._places, changes = _changes(copies)
        outputs, self._result = take_apart((result, changes) if changes else result)
        return tuple(outputs)

    def result(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Return the function's last result with these tensors in place of its own.

        Also change the caller's containers as the function has changed its copies of them.
        """
        result = put_together(self._result, outputs)
        if self._places:
            result, changes = result
            original = {id(place): value for value, place, _ in self._originals}
            for place, items in zip(self._places, changes, strict=True):
                own = [
                    (key, original[id(item.place)] if isinstance(item, _Given) else item)
                    for key, item in items
                ]
                put_items(original[id(place)], own)
        self._originals = None  # they may hold the outputs now, which hold this call
        return result

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


class _Given:
    """An argument, or a part of one, that stays in a container which a function has changed."""

    def __init__(self, place):
        self.place = place


def _changes(copies):
    """Return the placeholders of the containers that are changed, and the items of each."""
    now = [(place, items_of(new), items) for place, new, items in copies]
    changed = [(place, items) for place, items, before in now if not same_items(items, before)]
    given = {id(new): _Given(place) for place, new, _ in copies} if changed else {}
    places = [place for place, _ in changed]
    return places, [
        [(key, given.get(id(item), item)) for key, item in items] for _, items in changed
    ]


def take_apart(value: Any, copies: Copies | None = None) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors in a pytree, each once, and the pytree with placeholders for them.

    `copies` is as in `map_tensors`; if it is given, empty containers are replaced, too.
    """
    if isinstance(value, torch.Tensor):
        return [value], ALONE
    tensors = list({id(tensor): tensor for tensor in tensors_of(value)}.values())
    places = {}
    for number, tensor in enumerate(tensors):
        places[id(tensor)] = place = torch.empty(0)
        place.number = number
    empty = copies is not None
    return tensors, map_tensors(lambda tensor: places[id(tensor)], value, copies, empty)


def put_together(nest: Any, tensors: Sequence[torch.Tensor], copies: Copies | None = None) -> Any:
    """Return a pytree that `take_apart` took apart, with these tensors for its placeholders.

    `copies` is as in `take_apart`.
    """
    if nest is ALONE:
        return tensors[0]
    empty = copies is not None
    return map_tensors(lambda place: tensors[place.number], nest, copies, empty)


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
