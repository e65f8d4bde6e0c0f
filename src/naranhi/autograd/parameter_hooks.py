"""When the hooks of parameters run, where a backward goes through an inner graph as well.

Torch runs a parameter's hooks once in a backward, on the whole of its gradient. Two things get in
the way. `torch.autograd.grad` runs those of `register_hook`: an inner graph that is asked for a
gradient runs them first, and the outer graph again. And a `torch.autograd.Function` that returns no
gradient for a parameter, or none yet, makes the outer graph run all hooks on None.

So a gate stands before the hooks as long as that lasts. Torch keeps them in two dicts,
`_backward_hooks` and `_post_accumulate_grad_hooks`, where the gate wraps each in its place.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch


def has_hooks(parameter):
    """Whether there are hooks of `register_hook` or `register_post_accumulate_grad_hook`."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hooks_of_parameter(parameter):
    """The hooks of both kinds, also those before which a gate stands."""
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        for hook in (hooks or {}).values():
            if not isinstance(hook, _Gate):
                yield hook.hook if isinstance(hook, _Gated) else hook


@contextmanager
def at_rest(parameters):
    """Inside, `torch.autograd.grad` runs no hooks of these parameters."""
    gates = [_gate(one) for one in parameters if one._backward_hooks]
    for gate in gates:
        gate.resting += 1
    try:
        yield
    finally:
        for gate in gates:
            gate.resting -= 1
            gate.end_if_free()


def wait_for_gradient(parameter, later=None):
    """Hooks of a parameter that has no gradient here do not run, unless another use has one.

    Returns a function that ends that. later: where a gradient comes in another backward, what an
    error calls the parameter. RuntimeError is raised when this backward has one too: hooks would
    see two parts.
    """
    gate = _gate(parameter)
    gate.waiting, gate.later = gate.waiting + 1, later or gate.later

    def end():
        gate.waiting, gate.later = gate.waiting - 1, None
        gate.end_if_free()

    return end


def wait_where_none(parameters, gradients):
    """`wait_for_gradient` of each parameter whose gradient is None, to the end of this backward."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None and has_hooks(parameter):
            torch.autograd.Variable._execution_engine.queue_callback(wait_for_gradient(parameter))


class _Gated(NamedTuple):
    gate: object
    hook: object

    def __call__(self, value):
        return self.hook(value) if self.gate.is_open else None


class _Gate:
    """Stands before the hooks of a parameter, and is the first of them."""

    def __init__(self, parameter):
        self.parameter, self.later = parameter, None
        self.resting = self.waiting = 0
        self.is_open = True
        own = dict(parameter._backward_hooks or {})
        self._handle = parameter.register_hook(self)  # which makes the dict, if there is none
        parameter._backward_hooks.clear()
        parameter._backward_hooks[self._handle.id] = self
        parameter._backward_hooks.update(own)
        for hooks in self._places():
            hooks.update(
                (key, _Gated(self, hook)) for key, hook in hooks.items() if hook is not self
            )

    def _places(self):
        places = self.parameter._backward_hooks, self.parameter._post_accumulate_grad_hooks
        return [hooks for hooks in places if hooks]

    def __call__(self, gradient):
        self.is_open = gradient is not None and not self.resting
        if self.is_open and self.later:
            raise RuntimeError(
                f"{self.later} has a hook, and is used outside of its layer as well: the gradient "
                "of that use comes with those of the inputs, the layer's own one later, and the "
                "hook would see two parts; remove the hook, or run a schedule of whole backwards"
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
