"""Recomputation: keep a layer's inputs, free the rest, and compute the rest again when needed.

A forward without a graph saves nothing. The backward runs the forward again with a graph, and
differentiates that. The price is a second forward; the gain is everything that the layer would have
saved. The result is the same to the bit, as long as the second forward finds what the first one
found: the same weights, the same random numbers, the same precision.

Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost" (2016). In
production: `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, whose second forward also
stops as soon as the last tensor to be saved has been computed; ours goes on to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from naranhi.autograd.calls import Call
from naranhi.autograd.graph import find_stranger
from naranhi.autograd.parameter_hooks import inner_gradients, wait_where_none
from naranhi.autograd.wrapper import Wrapper

# All threads of a process share a generator. A recomputation holds this lock while the generator
# has an earlier state; a forward in another thread that may draw random numbers must hold it too.
GENERATOR = RLock()


def recompute(
    function: Callable[..., Any],
    /,
    *inputs: Any,
    parameters: Iterable[torch.Tensor] | None = None,
    **named: Any,
) -> Any:
    """Return `function(*inputs, **named)`, and keep only the inputs for the backward.

    The backward calls `function` again. Random numbers are the same: the state of torch's
    generators is restored (5,056 bytes on a CPU and 16 on a GPU, kept beside the inputs), and so is
    the training mode of modules. A function may change inputs that need no gradient, and a module
    may change its buffers: the second call works on copies of the original values. What a function
    puts into a list, dict or dataclass among its inputs that has tensors, or into an empty list or
    dict, is there once, with its gradient. Anything else that a function changes, it changes twice,
    and hooks of modules in it run twice, as with torch's own checkpoints. Without any tensor that
    requires a gradient, `function` is just called.

    Args:
        function: returns tensors, also in tuples, lists, dicts and dataclasses, the same in every
            call. Buffers and modes are restored if it is a module or a module's method.
        *inputs: tensors, also in tuples, lists, dicts and dataclasses; anything else is passed on
            unchanged.
        parameters: the tensors besides the inputs that receive a gradient; by default the
            parameters of `function` if it is a module. Their hooks run once, as usual.
        **named: as `inputs`.

    Raises:
        TypeError: if `function` returns no tensor, or an object that may hide one.
        ValueError: in the backward, if the function used a tensor that requires a gradient and is
            neither an input nor in `parameters`: its gradient would be lost.
        RuntimeError: if the function changes in place an input that requires a gradient; in the
            backward, if it writes a tensor that requires one into another input, if an input, a
            parameter or a buffer has been changed in place since the forward, or if a parameter of
            the module has been replaced.
    """
    if parameters is None:
        parameters = function.parameters() if isinstance(function, nn.Module) else ()
    return _recompute(function, inputs, named, parameters)


def _recompute(function, inputs, named, parameters):
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    call, tensors = Call.of(function, inputs, named)
    if not any(tensor.requires_grad for tensor in (*tensors, *parameters)):
        return function(*inputs, **named)
    return call.result(RecomputeFunction.apply(call, len(tensors), *tensors, *parameters))


class Recompute(Wrapper):
    """A layer of which only the inputs are kept for the backward; see `recompute`."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the layer by `recompute`."""
        return _recompute(self.layer, inputs, named, self.parameters())


class RecomputeFunction(torch.autograd.Function):
    """The node of `recompute` in autograd's graph."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, run: Call, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run the call without a graph on the first `count` tensors; the rest are parameters."""
        ctx.run, ctx.parameters = run, tensors[count:]
        ctx.circumstances = _Circumstances(tensors, run.function)
        ctx.set_materialize_grads(False)
        inputs = tensors[:count]
        found = _note(inputs)
        outputs = run(inputs)
        ctx.circumstances.state.forget_the_same()
        copies = _copies_of_changed(inputs, found)
        _refuse_gradients(run.name, inputs, copies)
        ctx.changed = list(copies)
        # Parameters live anyway: they are saved so that autograd notices if they have changed.
        saved = [copies.get(place, tensor) for place, tensor in enumerate(tensors)]
        ctx.save_for_backward(*saved)
        # A mask passed through has no gradient. Other outputs may have one.
        constants = {id(tensor) for tensor in saved if not tensor.requires_grad}
        ctx.mark_non_differentiable(*(output for output in outputs if id(output) in constants))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Run the call again, with a graph, and differentiate that."""
        saved, wants_gradient = ctx.saved_tensors, ctx.needs_input_grad[2:]
        count = len(saved) - len(ctx.parameters)
        inputs = [
            tensor.detach().requires_grad_(wants)
            for tensor, wants in zip(saved[:count], wants_gradient[:count], strict=True)
        ]
        for place in ctx.changed:  # the call changes it again
            inputs[place] = inputs[place].clone()
        with torch.enable_grad(), ctx.circumstances.restored():
            outputs = ctx.run(inputs)
        _refuse_gradients(ctx.run.name, inputs, ctx.changed)
        known = [*inputs, *ctx.parameters]
        _refuse_strangers(outputs, known)
        pairs = zip(outputs, gradients, strict=True)
        used = [pair for pair in pairs if pair[0].requires_grad and pair[1] is not None]
        grads = inner_gradients(used, known, ctx.parameters)
        wait_where_none(ctx.parameters, grads[count:])
        return None, None, *grads


class _Circumstances:
    """What a result depends on besides inputs and weights: RNG, autocast, buffers and modes."""

    def __init__(self, tensors, function):
        self.gpus = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
        self.random = torch.get_rng_state()
        self.gpus_random = [torch.cuda.get_rng_state(gpu) for gpu in self.gpus]
        self.precision = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in (["cpu", "cuda"] if self.gpus else ["cpu"])
        ]
        self.state = _State(function)

    @contextmanager
    def restored(self):
        with ExitStack() as stack:
            stack.enter_context(GENERATOR)
            stack.enter_context(torch.random.fork_rng(self.gpus))
            torch.set_rng_state(self.random)
            for gpu, state in zip(self.gpus, self.gpus_random, strict=True):
                torch.cuda.set_rng_state(state, gpu)
            for kind, dtype, enabled in self.precision:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(self.state.as_found())
            yield


class _State:
    """The state of a module as a forward found it; other functions have none.

    Buffers and modes are restored. Parameters must be the same: `functional_call` replaces them for
    the forward only, and the recomputation would silently take others.
    """

    def __init__(self, function):
        owner = getattr(function, "__self__", function)  # of a method
        modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
        self._modes = [(module, module.training) for module in modules]
        self._weights = [
            (module._parameters, name, param)
            for module in modules
            for name, param in module._parameters.items()
        ]
        self._places = [
            (module._buffers, name)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        met = {id(one): (one, _version(one), one.clone()) for one in self._now()}
        self._met = [met[id(buffer)] for buffer in self._now()]

    def _now(self):
        return [buffers[name] for buffers, name in self._places]

    def forget_the_same(self):
        """Keep copies only of buffers that the forward has changed or replaced."""
        for place, now in enumerate(self._now()):
            buffer, version, _ = self._met[place]
            # Torch counts no changes of tensors made in inference mode, so their copies are kept.
            if now is buffer and version is not None and version == now._version:
                self._met[place] = buffer, version, None

    @contextmanager
    def as_found(self):
        """Restore the modes, and replace buffers by copies, which may change, inside the context.

        Raises:
            RuntimeError: if a buffer without a copy has been changed in place, or a parameter has
                been replaced.
        """
        for weights, name, param in self._weights:
            if weights.get(name) is not param:
                raise RuntimeError(
                    f"the parameter {name} has been replaced since the forward that is recomputed, "
                    "by functional_call, say: replace it after the backward, or pass it to "
                    "`recompute` as an input"
                )
        for (_, name), (buffer, version, copy) in zip(self._places, self._met, strict=True):
            if copy is None and _version(buffer) != version:
                raise RuntimeError(
                    f"the buffer {name}, of shape {tuple(buffer.shape)}, has been changed in place "
                    "since the forward that is recomputed: change it after the backward"
                )
        own, copies = self._now(), {}
        modes = [(module, module.training) for module, _ in self._modes]
        for (buffers, name), (buffer, _, copy) in zip(self._places, self._met, strict=True):
            source = buffer if copy is None else copy
            buffers[name] = copies.setdefault(id(source), source.clone())
        _set_modes(self._modes)
        try:
            yield
        finally:
            _set_modes(modes)
            for (buffers, name), now in zip(self._places, own, strict=True):
                buffers[name] = now


def _set_modes(modes):
    for module, training in modes:
        if module.training != training:
            module.training = training


def _version(tensor):
    """Return how often a tensor was changed in place; None if torch does not count that."""
    return None if tensor.is_inference() else tensor._version


def _note(inputs):
    """Return (version, copy) of each; no copy if it requires a gradient, as it must not change."""
    return [(_version(one), None if one.requires_grad else one.clone()) for one in inputs]


def _copies_of_changed(inputs, found):
    """Return {place: copy} of the inputs that have been changed in place since `_note`."""
    pairs = zip(inputs, found, strict=True)
    return {
        place: copy
        for place, (tensor, (version, copy)) in enumerate(pairs)
        if _version(tensor) != version
    }


def _refuse_gradients(name, inputs, changed):
    """Raise RuntimeError if one of the inputs that a function has changed requires a gradient."""
    for place in changed:
        if inputs[place].requires_grad:
            raise RuntimeError(
                f"{name} changes in place what needs a gradient: tensor {place} of its inputs, of "
                f"shape {tuple(inputs[place].shape)}; the recomputation would fail, or lose that "
                "gradient: change a clone() of it instead"
            )


def _refuse_strangers(outputs, known):
    """Raise ValueError if the graph of the outputs has a leaf that is not in `known`."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    stranger = find_stranger(nodes, known)
    if stranger is not None:
        raise ValueError(
            f"the recomputed function uses a tensor of shape {tuple(stranger.shape)} that requires "
            "a gradient and is neither an input nor in `parameters`: its gradient would be lost"
        )
