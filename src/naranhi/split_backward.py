"""The backward in two parts: the inputs' gradients at once, the weights' whenever there is time.

The stage before waits for the gradient of a stage's input. Nobody waits for the gradients of its
weights but the optimizer: a zero-bubble schedule does them where it would otherwise stand still.

A `Splittable` layer is one node in autograd's graph, and holds the layer's own graph inside. Its
backward goes through that once for the inputs, and hands on a function that goes through it once
more for the weights. So nothing is done twice where a layer is a single operation, a product or a
norm; `splittable` wraps a model's layers at that depth.

Source: Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism" (2024), section 2.
"""

from time import perf_counter

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from naranhi.recomputation import checked_outputs, flatten


class Splittable(nn.Module):
    """A layer whose backward can leave the gradients of its weights for later.

    While `defer` is a function, and not None, the backward computes the inputs' gradients only, and
    hands `defer` another function; calling that adds the weights' gradients to `.grad`. Otherwise
    the backward does both. Results and gradients are the layer's own.

    layer: takes and returns tensors or tuples of tensors. TypeError if it returns anything else.
    """

    def __init__(self, layer):
        super().__init__()
        self.layer, self.defer = layer, None

    def forward(self, *inputs):
        tensors, rebuild = flatten(inputs)
        weights = [weight for weight in self.layer.parameters() if weight.requires_grad]

        def run(tensors):
            return checked_outputs(self.layer, self.layer(*rebuild(tensors)))

        return _Node.apply(self, run, torch.is_grad_enabled(), len(tensors), *tensors, *weights)

    def done(self, start, what):
        """Called when a part has been done that began at `start`, by perf_counter: "forward",
        "backward", or of that "input_grad" or "weight_grad"."""


class SplittableLinear(Splittable):
    """A `Splittable` for `nn.Linear`, by the two products that its backward is made of."""

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):  # which casts before the product
            return super().forward(x)
        return _Linear.apply(self, x, self.layer.weight, self.layer.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, weight, bias):
        ctx.layer, ctx.weight, ctx.bias = layer, weight, bias
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad

        @torch.no_grad()
        def weight_grad():
            rows = gradient.reshape(-1, gradient.shape[-1])
            return (rows.t() @ x.reshape(len(rows), -1) if wants_weight else None,
                    rows.sum(0) if wants_bias else None)

        found = gradient @ weight if wants_x else None
        if ctx.layer.defer is None:
            return None, found, *weight_grad()
        weights = ctx.weight, ctx.bias
        ctx.layer.defer(lambda: _add(weights, weight_grad()))
        return None, found, None, None


def _add(weights, gradients):
    """Add each gradient that there is to the `.grad` of its weight."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None and weight.grad is None:
            weight.grad = gradient
        elif gradient is not None:
            weight.grad += gradient


def splittable(layers):
    """The layers, each module in them that has weights of its own replaced by a `Splittable` one.

    The replacement is in place, except for a layer that is such a module itself; parameters stay
    the same objects. Give the list that is returned to a `Pipeline`. A module that has a better way
    to be one than `Splittable(module)` returns it from a method `as_splittable()`.
    """
    return [_wrapped(layer) for layer in layers]


def _wrapped(module):
    if isinstance(module, Splittable):
        return module
    if type(module) is nn.Linear:
        return SplittableLinear(module)
    if hasattr(module, "as_splittable"):
        return module.as_splittable()
    if next(module.parameters(recurse=False), None) is not None:
        return Splittable(module)
    for name, child in module.named_children():
        setattr(module, name, _wrapped(child))
    return module


def not_splittable(layer):
    """The names of a layer's weights whose gradient cannot be left for later."""
    covered = {id(weight) for module in layer.modules() if isinstance(module, Splittable)
               for weight in module.parameters()}
    return [name for name, weight in layer.named_parameters()
            if weight.requires_grad and id(weight) not in covered]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, run, with_graph, count, *tensors):
        start = perf_counter()
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad)
                  for tensor in tensors[:count]]
        with torch.set_grad_enabled(with_graph):
            result = run(inputs)
        several = result if isinstance(result, tuple) else (result,)
        ctx.layer, ctx.inputs, ctx.weights = layer, inputs, tensors[count:]
        # Of the results only their place in the graph is needed: their storage may go.
        ctx.edges = [get_gradient_edge(one) if one.requires_grad else None for one in several]
        ctx.set_materialize_grads(False)
        layer.done(start, "forward")
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
            wanted = [weight for weight in weights if weight.requires_grad]
            if used and wanted:
                # Autograd adds to `.grad` itself: what it finds may share its storage with another
                # gradient, such as the input's, which is perhaps being sent.
                edges, given = zip(*used, strict=True)
                torch.autograd.backward(edges, given, inputs=wanted)
            layer.done(start, "weight_grad")

        layer, inputs, weights = ctx.layer, ctx.inputs, ctx.weights
        if layer.defer is None:
            found = gradients_of([*inputs, *weights], False)
            layer.done(start, "backward")
        else:
            found = gradients_of(inputs, True) + [None] * len(weights)
            layer.defer(weight_grad)
            layer.done(start, "input_grad")
        return None, None, None, None, *found
