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

# A process has one generator for all threads. Held while a recomputation has it restored; a forward
# in another thread, which may draw meanwhile, has to hold it too.
GENERATOR = RLock()


def recompute(
    function: Callable[..., Any],
    *inputs: Any,
    parameters: Iterable[torch.Tensor] | None = None,
    **named: Any,
) -> Any:
    """Return `function(*inputs, **named)`, and keep only the inputs for the backward.

    The backward calls `function` again. Random numbers are the same: the state of torch's
    generators is restored (5,056 bytes on a CPU and 16 on a GPU, kept beside the inputs). A module
    may change its buffers: the second call works on copies of what the first call found, and does
    not see the changes. Anything else that a function changes, it changes twice, and hooks of
    modules in it run twice, as with torch's own. Without any tensor that requires a gradient,
    `function` is just called.

    Args:
        function: returns tensors, also in tuples, lists, dicts and dataclasses; every call returns
            the same.
        *inputs: tensors, also in tuples, lists, dicts and dataclasses; anything else is passed on
            unchanged.
        parameters: the tensors besides the inputs that receive a gradient; by default the
            parameters of `function` if it is a module. Their hooks run once, as usual.
        **named: as `inputs`.

    Raises:
        TypeError: if `function` returns something else.
        ValueError: in the backward, if the function used another tensor that requires a gradient,
            which would not receive it.
        RuntimeError: in the backward, if an input or a parameter has been changed in place since
            the forward.
    """
    if parameters is None:
        parameters = function.parameters() if isinstance(function, nn.Module) else ()
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    call, tensors = Call.of(function, inputs, named)
    if not any(tensor.requires_grad for tensor in (*tensors, *parameters)):
        return function(*inputs, **named)
    return call.result(RecomputeFunction.apply(call, len(tensors), *tensors, *parameters))


class Recompute(Wrapper):
    """A layer of which only the inputs are kept for the backward; see `recompute`."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the layer by `recompute`."""
        return recompute(self.layer, *inputs, parameters=self.parameters(), **named)


class RecomputeFunction(torch.autograd.Function):
    """The node of `recompute` in autograd's graph."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, run: Call, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run the call without a graph on the first `count` tensors; the rest are parameters."""
        ctx.run, ctx.parameters = run, tensors[count:]
        ctx.circumstances = _Circumstances(tensors, run.function)
        # Parameters live anyway: they are saved so that autograd notices if they have changed.
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outputs = run(tensors[:count])
        ctx.circumstances.buffers.forget_the_same()
        # A passed-on mask has no gradient; without a graph, nothing is known of the other outputs.
        constants = {id(tensor) for tensor in tensors if not tensor.requires_grad}
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
        with torch.enable_grad(), ctx.circumstances.restored():
            outputs = ctx.run(inputs)
        known = [*inputs, *ctx.parameters]
        _refuse_strangers(outputs, known)
        pairs = zip(outputs, gradients, strict=True)
        used = [pair for pair in pairs if pair[0].requires_grad and pair[1] is not None]
        grads = inner_gradients(used, known, ctx.parameters)
        wait_where_none(ctx.parameters, grads[count:])
        return None, None, *grads


class _Circumstances:
    """What a result depends on besides inputs and weights: RNG state, autocast and buffers."""

    def __init__(self, tensors, function):
        self.gpus = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
        self.random = torch.get_rng_state()
        self.gpus_random = [torch.cuda.get_rng_state(gpu) for gpu in self.gpus]
        self.precision = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in (["cpu", "cuda"] if self.gpus else ["cpu"])
        ]
        self.buffers = _Buffers(function)

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
            stack.enter_context(self.buffers.copies())
            yield


class _Buffers:
    """The buffers of a module as a forward found them; any other function has none."""

    def __init__(self, function):
        modules = function.modules() if isinstance(function, nn.Module) else ()
        self._places = [
            (module._buffers, name)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        met = {id(buffer): (buffer, buffer._version, buffer.clone()) for buffer in self._now()}
        self._met = [met[id(buffer)] for buffer in self._now()]

    def _now(self):
        return [buffers[name] for buffers, name in self._places]

    def forget_the_same(self):
        """Keep copies only of buffers that the forward has changed or replaced."""
        self._met = [
            copy if now is not buffer or buffer._version != version else None
            for (buffer, version, copy), now in zip(self._met, self._now(), strict=True)
        ]

    @contextmanager
    def copies(self):
        """Replace the module's buffers with copies, which may change, inside the context."""
        own, copies = self._now(), {}
        for (buffers, name), met, now in zip(self._places, self._met, own, strict=True):
            source = now if met is None else met
            buffers[name] = copies.setdefault(id(source), source.clone())
        try:
            yield
        finally:
            for (buffers, name), now in zip(self._places, own, strict=True):
                buffers[name] = now


def _refuse_strangers(outputs, known):
    """Raise ValueError if the graph of the outputs has a leaf that is not in `known`."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    stranger = find_stranger(nodes, known)
    if stranger is not None:
        raise ValueError(
            f"the recomputed function uses a tensor of shape {tuple(stranger.shape)} that requires "
            "a gradient and is neither an input nor in `parameters`: its gradient would be lost"
        )
