"""Control when a parameter's hooks run if a backward also goes through an inner graph.

Torch runs a parameter's hooks once per backward, on the whole gradient. An inner graph breaks that
in two ways. `torch.autograd.grad` runs the hooks of `register_hook`: an inner graph runs them on
its part of the gradient, and the outer graph runs them again. And a `torch.autograd.Function` that
returns no gradient for a parameter, or not yet, makes the outer graph run all hooks on None.

So a gate stands before the hooks while either can happen. Torch keeps the hooks in two dicts,
`_backward_hooks` and `_post_accumulate_grad_hooks`, where the gate wraps each hook in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.autograd.graph import GradientEdge


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether it has hooks of `register_hook` or `register_post_accumulate_grad_hook`."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hooks_of_parameter(parameter: torch.Tensor) -> Iterator[Callable[..., Any]]:
    """Yield a parameter's hooks of both kinds, including those behind a gate."""
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        for hook in (hooks or {}).values():
            if not isinstance(hook, _Gate):
                yield hook.hook if isinstance(hook, _Gated) else hook


@contextmanager
def at_rest(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keep `torch.autograd.grad` from running hooks of these parameters, inside the context."""
    gates = [_gate(param) for param in parameters if param._backward_hooks]
    for gate in gates:
        gate.resting += 1
    try:
        yield
    finally:
        for gate in gates:
            gate.resting -= 1
            gate.end_if_free()


def inner_gradients(
    pairs: Sequence[tuple[torch.Tensor | GradientEdge, torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    parameters: Iterable[torch.Tensor],
    keep_graph: bool = False,
) -> list[torch.Tensor | None]:
    """Return the gradient of each of `tensors` through an inner graph; None if it has none there.

    Args:
        pairs: outputs of the inner graph, or their edges, each with its gradient.
        tensors: inputs and parameters.
        parameters: the parameters whose hooks the outer graph runs.
        keep_graph: whether the inner graph may be traversed again.
    """
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not (pairs and wanted):
        return [None] * len(tensors)
    outputs, given = zip(*pairs, strict=True)
    with at_rest(parameters):
        computed = torch.autograd.grad(
            outputs, wanted, given, retain_graph=keep_graph, allow_unused=True
        )
    grads = iter(computed)
    return [next(grads) if tensor.requires_grad else None for tensor in tensors]


def wait_for_gradient(parameter: torch.Tensor, later: str | None = None) -> Callable[[], None]:
    """Skip the hooks of a parameter that has no gradient here, unless another use has one.

    Args:
        parameter: the parameter whose hooks wait.
        later: the parameter's name in an error, if its gradient comes in another backward. If
            this backward has one too, it raises RuntimeError: hooks would see two parts.

    Returns:
        A function that ends the wait.
    """
    gate = _gate(parameter)
    gate.waiting, gate.later = gate.waiting + 1, later or gate.later

    def end():
        gate.waiting, gate.later = gate.waiting - 1, None
        gate.end_if_free()

    return end


def wait_where_none(
    parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> None:
    """Call `wait_for_gradient` for each parameter without a gradient, until this backward ends."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None and has_hooks(parameter):
            torch.autograd.Variable._execution_engine.queue_callback(wait_for_gradient(parameter))


class _Gated(NamedTuple):
    gate: object
    hook: object

    def __call__(self, value):
        return self.hook(value) if self.gate.is_open else None


class _Gate:
    """The first hook of a parameter, which decides whether its other hooks run."""

    def __init__(self, parameter):
        # Weak, because the parameter's C++ half owns its hooks, where no collector sees the cycle.
        self._parameter, self.later = ref(parameter), None
        self.resting = self.waiting = 0
        self.is_open = True
        own = dict(parameter._backward_hooks or {})
        self._handle = parameter.register_hook(self)  # creates the dict if it does not exist
        parameter._backward_hooks.clear()
        parameter._backward_hooks[self._handle.id] = self
        parameter._backward_hooks.update(own)
        for hooks in self._places():
            hooks.update(
                (key, _Gated(self, hook)) for key, hook in hooks.items() if hook is not self
            )

    def _places(self):
        parameter = self._parameter()
        if parameter is None:
            return []
        places = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        return [hooks for hooks in places if hooks]

    def __call__(self, gradient):
        self.is_open = gradient is not None and not self.resting
        if self.is_open and self.later:
            raise RuntimeError(
                f"{self.later} has a hook and is also used outside its layer: in a split backward, "
                "the gradients of the two uses arrive at different times, and the hook would see "
                "them one by one; remove the hook, or use a schedule with unsplit backwards"
            )

    def end_if_free(self):
        if self.resting or self.waiting:
            return
        self._handle.remove()
        for hooks in self._places():
            hooks.update(
                (key, hook.hook)
                for key, hook in hooks.items()
                if isinstance(hook, _Gated) and hook.gate is self
            )


def _gate(parameter):
    first = next(iter((parameter._backward_hooks or {}).values()), None)
    return first if isinstance(first, _Gate) else _Gate(parameter)
