"""Layers of any speed: real arithmetic, then a wait, as if each rank had a device of its own.

With fewer cores than ranks, the time of a step tells how the cores were shared. Units: seconds.
"""

from math import isfinite
from time import perf_counter, sleep

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from naranhi.recomputation import checked_outputs, flatten


class Paced(nn.Module):
    """A layer on a device of a given speed: real arithmetic, then a wait until its time is over.

        Paced(layer, forward=0.02, backward=0.04)

    Waiting takes no core. So four ranks that share two cores take as long as four devices would, if
    only the arithmetic is quick against the times. `late` counts how often it was not, and the time
    therefore longer: it should stay 0.

    layer: takes and returns tensors or tuples of tensors. Its results and gradients stay the same.
    forward, backward: seconds, in which a GPU has finished too.

    The backward can be split. While `defer` is a function, and not None, the backward computes the
    inputs' gradients only, in `input_grad` seconds, and hands `defer` another function; calling
    that adds the weights' gradients to `.grad`, in `weight_grad` seconds. By default each takes
    half of `backward`.

    Raises ValueError for a time that is negative or not finite, TypeError for a layer that returns
    anything else.
    """

    def __init__(self, layer, forward, backward, input_grad=None, weight_grad=None):
        super().__init__()
        self.layer = layer
        self.times = {
            "forward": forward, "backward": backward,
            "input_grad": backward / 2 if input_grad is None else input_grad,
            "weight_grad": backward / 2 if weight_grad is None else weight_grad}
        for name, seconds in self.times.items():
            if not (isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name} is a time in seconds, 0 or more, not {seconds!r}")
        self.defer = None
        self.late = 0

    def forward(self, *inputs):
        tensors, rebuild = flatten(inputs)
        weights = [weight for weight in self.layer.parameters() if weight.requires_grad]

        def run(tensors):
            return checked_outputs(self.layer, self.layer(*rebuild(tensors)))

        return _PacedFunction.apply(self, run, torch.is_grad_enabled(), len(tensors), *tensors,
                                    *weights)

    def wait(self, start, what):
        """Return when `what` has taken its time since `start`, on the clock of perf_counter."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        left = start + self.times[what] - perf_counter()
        self.late += left < 0
        sleep(max(0.0, left))


class _PacedFunction(torch.autograd.Function):
    """One node in the graph, which holds the layer's own graph: so its backward can be timed."""

    @staticmethod
    def forward(ctx, paced, run, with_graph, count, *tensors):
        start = perf_counter()
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad)
                  for tensor in tensors[:count]]
        with torch.set_grad_enabled(with_graph):
            result = run(inputs)
        several = result if isinstance(result, tuple) else (result,)
        ctx.paced, ctx.inputs, ctx.weights = paced, inputs, tensors[count:]
        # Of the results only their place in the graph is needed: their storage may go.
        ctx.edges = [get_gradient_edge(one) if one.requires_grad else None for one in several]
        ctx.set_materialize_grads(False)
        paced.wait(start, "forward")
        several = tuple(one.detach() for one in several)
        ctx.mark_non_differentiable(
            *(one for one, edge in zip(several, ctx.edges, strict=True) if edge is None))
        return several if isinstance(result, tuple) else several[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        start = perf_counter()
        used = [(edge, gradient) for edge, gradient in zip(ctx.edges, gradients, strict=True)
                if edge is not None and gradient is not None]

        def gradients_of(tensors, keep):
            """None for a tensor that requires none."""
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            if not (used and wanted):
                return [None] * len(tensors)
            edges, given = zip(*used, strict=True)
            found = iter(torch.autograd.grad(
                edges, wanted, given, retain_graph=keep, allow_unused=True))
            return [next(found) if tensor.requires_grad else None for tensor in tensors]

        def weight_grad():
            start = perf_counter()
            for weight, gradient in zip(weights, gradients_of(weights, False), strict=True):
                if gradient is not None and weight.grad is None:
                    weight.grad = gradient
                elif gradient is not None:
                    weight.grad += gradient
            paced.wait(start, "weight_grad")

        paced, inputs, weights = ctx.paced, ctx.inputs, ctx.weights
        if paced.defer is None:
            found = gradients_of([*inputs, *weights], False)
            paced.wait(start, "backward")
        else:
            found = gradients_of(inputs, True) + [None] * len(weights)
            paced.defer(weight_grad)
            paced.wait(start, "input_grad")
        return None, None, None, None, *found
