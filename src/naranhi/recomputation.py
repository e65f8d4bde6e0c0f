"""Recomputation: keep a layer's inputs, forget the rest, and compute it again when it is needed.

A forward without a graph saves nothing; the backward runs it once more with one, and differentiates
that. The price is a second forward, the gain all that the layer would have kept. The result is the
same to the bit, as long as the second forward meets what the first one met: the same weights, the
same random numbers, the same precision.

Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost" (2016). In
production: `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, whose second forward also
stops as soon as the last thing to be kept has been computed; ours goes on to the end.
"""

from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.autograd.function import once_differentiable


def recompute(function, *inputs, parameters=None):
    """`function(*inputs)`, of which only the inputs are kept for the backward.

    function: returns a tensor or a tuple of tensors, the same whenever it is called. It may draw
    random numbers, as the state of torch's generators is restored (5,056 bytes on a CPU and 16 on
    a GPU, kept beside the inputs). What it changes besides, such as the running means of a batch
    norm, it changes twice.
    inputs: tensors, tuples of tensors, or anything else, which is handed on as it is.
    parameters: the tensors besides the inputs that shall receive a gradient; by default those of
    `function` when that is a module. Without any tensor that requires a gradient, `function` is
    just called.

    Raises TypeError when `function` returns something else. The backward raises ValueError when
    the function used another tensor that requires a gradient, which would not receive it, and
    RuntimeError when an input or a parameter has been changed in place since the forward.
    """
    if parameters is None:
        parameters = function.parameters() if isinstance(function, nn.Module) else ()
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    tensors, rebuild = flatten(inputs)
    if not any(tensor.requires_grad for tensor in (*tensors, *parameters)):
        return function(*inputs)

    def run(tensors):
        return checked_outputs(function, function(*rebuild(tensors)))

    return _Recompute.apply(run, len(tensors), *tensors, *parameters)


class Recompute(nn.Module):
    """A layer of which only the inputs are kept for the backward; see `recompute`."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        return recompute(self.layer, *inputs)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, count, *tensors):
        ctx.run, ctx.parameters = run, tensors[count:]
        ctx.circumstances = _Circumstances(tensors)
        # The parameters live anyway. They are here so that autograd notices when they have changed.
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outputs = run(tensors[:count])
        # A mask that is handed on has no gradient; of the rest nothing can be said without a graph.
        constants = {id(tensor) for tensor in tensors if not tensor.requires_grad}
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.mark_non_differentiable(*(one for one in several if id(one) in constants))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        saved, wants_gradient = ctx.saved_tensors, ctx.needs_input_grad[2:]
        count = len(saved) - len(ctx.parameters)
        inputs = [tensor.detach().requires_grad_(wants)
                  for tensor, wants in zip(saved[:count], wants_gradient[:count], strict=True)]
        with torch.enable_grad(), ctx.circumstances.restored():
            outputs = ctx.run(inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        known = [*inputs, *ctx.parameters]
        _refuse_strangers(outputs, known)

        used = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True)
                if output.requires_grad and gradient is not None]
        if not used:
            return (None,) * len(ctx.needs_input_grad)
        found = iter(torch.autograd.grad(
            [output for output, _ in used],
            [tensor for tensor, wants in zip(known, wants_gradient, strict=True) if wants],
            [gradient for _, gradient in used], allow_unused=True))
        return None, None, *(next(found) if wants else None for wants in wants_gradient)


class _Circumstances:
    """What a result depends on besides inputs and weights: random state and autocast."""

    def __init__(self, tensors):
        self.gpus = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
        self.random = torch.get_rng_state()
        self.gpus_random = [torch.cuda.get_rng_state(gpu) for gpu in self.gpus]
        self.precision = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in (["cpu", "cuda"] if self.gpus else ["cpu"])]

    @contextmanager
    def restored(self):
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.gpus))
            torch.set_rng_state(self.random)
            for gpu, state in zip(self.gpus, self.gpus_random, strict=True):
                torch.cuda.set_rng_state(state, gpu)
            for kind, dtype, enabled in self.precision:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


def _refuse_strangers(outputs, known):
    """Raise ValueError if the graph of the outputs ends in a leaf that is not among the known."""
    known = {id(tensor) for tensor in known}
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name().endswith("AccumulateGrad") and id(node.variable) not in known:
            shape = tuple(node.variable.shape)
            raise ValueError(
                f"the recomputed function uses a tensor of shape {shape} that requires a gradient "
                "and is neither an input nor in `parameters`: its gradient would be lost")
        nodes += (new := {parent for parent, _ in node.next_functions if parent} - seen)
        seen |= new


_SLOT = object()


def flatten(values):
    """The tensors in nested tuples, and a function that puts others in their places."""
    tensors = []

    def strip(value):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _SLOT
        return tuple(map(strip, value)) if type(value) is tuple else value

    places = strip(tuple(values))

    def rebuild(tensors):
        tensors = iter(tensors)

        def fill(value):
            if value is _SLOT:
                return next(tensors)
            return tuple(map(fill, value)) if type(value) is tuple else value

        return fill(places)

    return tensors, rebuild


def checked_outputs(function, outputs):
    """The outputs, if they are a tensor or a tuple of tensors; else TypeError naming `function`."""
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    for output in several:
        if not isinstance(output, torch.Tensor):
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(
                f"{name} returned {type(output).__name__}, not a tensor or a tuple of tensors")
    return outputs
