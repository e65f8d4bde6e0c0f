"""The backward in two parts: input gradients at once, weight gradients when there is time.

The previous stage waits for the gradient of a stage's input. Only the optimizer waits for the
gradients of the stage's weights, so a zero-bubble schedule computes them where a rank would
otherwise sit idle.

A `Splittable` layer is one node in autograd's graph, and contains the layer's own graph. Its
backward traverses that graph once for the inputs, and passes on a function that traverses it once
more for the weights. So nothing is computed twice if a layer is a single operation, such as a
matrix product or a norm: `splitting.splittable` turns a model's layers into such nodes at that
depth.

Source: Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism" (2024), section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from naranhi.autograd.autocast import has_autocast, without_autocast
from naranhi.autograd.calls import Call
from naranhi.autograd.graph import find_stranger, has_group_norm
from naranhi.autograd.module_hooks import is_compiled
from naranhi.autograd.parameter_hooks import inner_gradients, wait_where_none
from naranhi.autograd.weight_gradients import Later
from naranhi.autograd.wrapper import Wrapper


class Splittable(Wrapper):
    """A layer whose backward can leave the gradients of its weights for later.

    While `defer` is a function, a backward computes only the input gradients, and calls `defer`
    with another function, which adds the weight gradients to `.grad`. While `defer` is None, the
    backward does both. Results and gradients do not change. Set `defer` anew for each
    backward.

    Hooks of the layer's parameters run once per backward, in the weights' part. If the layer's own
    graph has hooks (of modules in the layer, or registered on tensors by its forward), or if a
    module in the layer is compiled, the graph is traversed once: the inputs' part computes all
    gradients, and the weights' part adds them to `.grad`.

    Args:
        layer: takes and returns tensors, also in tuples, lists, dicts and dataclasses.

    Raises:
        TypeError: if the layer returns anything else, or this module, not the one inside, has a
            hook of the deprecated `register_backward_hook`.
        ValueError: if a gradient would be lost, or torch would crash (see `has_group_norm`).
        RuntimeError: if the layer changes in place an argument that needs a gradient, or needs one
            after the change.
    """

    _later, _sharing = None, None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self._path = type(layer).__name__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward in one node of autograd's graph."""
        _refuse_old_hooks(self)
        call, tensors = Call.of(self._own_forward, args, kwargs, self._path)
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        outputs = SplitFunction.apply(
            self, call, torch.is_grad_enabled(), len(tensors), *tensors, *weights
        )
        return call.result(outputs)

    def _own_forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)

    @property
    def defer(self) -> Callable[[Callable[[], None]], None] | None:
        """The function that a backward calls to defer the weight gradients, or None."""
        return self._later and self._later.defer

    @defer.setter
    def defer(self, function: Callable[[Callable[[], None]], None] | None) -> None:
        if self._later:
            self._later.end()
        # nn.Module.__setattr__ takes as long as a small layer.
        vars(self)["_later"] = Later(function, self._path, self.done) if function else None

    @property
    def later(self) -> Later | None:
        """Where a backward leaves the weight gradients; None while backwards are not split."""
        return self._sharing.join(self._later) if self._sharing and self._later else self._later

    def done(self, start: float, what: str) -> None:
        """Do nothing when a part is done; a derived class may override this.

        Args:
            start: when the part began, by perf_counter.
            what: "forward", "backward", or a part of that: "input_grad" or "weight_grad".
        """


class SplitFunction(torch.autograd.Function):
    """The node of a `Splittable` layer in autograd's graph."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        layer: Splittable,
        call: Call,
        with_graph: bool,
        count: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the call on the first `count` tensors, and keep its graph; the rest are weights."""
        start, handles = perf_counter(), RemovableHandle.next_id
        inputs = [
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors[:count]
        ]
        with torch.set_grad_enabled(with_graph):
            outputs = _called(call, inputs, layer._path)
        ctx.layer, ctx.inputs, ctx.weights = layer, inputs, tensors[count:]
        # A hook of any kind that the call has registered must not run in two backwards.
        ctx.once = RemovableHandle.next_id != handles or any(map(is_compiled, layer.modules()))
        # Only the outputs' place in the graph is needed, so their storage may be freed.
        ctx.edges = [
            get_gradient_edge(output) if with_graph and output.requires_grad else None
            for output in outputs
        ]
        ctx.set_materialize_grads(False)
        _refuse_open_graph(ctx)
        layer.done(start, "forward")
        outputs = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(
            *(output for output, edge in zip(outputs, ctx.edges, strict=True) if edge is None)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Compute the input gradients; the weight gradients too, or leave them for later."""
        start, later, inputs, weights = perf_counter(), ctx.layer.later, ctx.inputs, ctx.weights
        pairs = zip(ctx.edges, grads, strict=True)
        used = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
        if later and not ctx.once:
            to_inputs = inner_gradients(used, inputs, weights, keep_graph=True)
            to_weights = [None] * len(weights)
            later.leave(weights, lambda: used)
        else:
            kept = torch._C._autograd._get_current_graph_task_keep_graph()
            both = inner_gradients(used, [*inputs, *weights], weights, kept)
            to_inputs, to_weights = both[: len(inputs)], both[len(inputs) :]
        if later and ctx.once:
            starts, to_weights = _starts(weights, to_weights), [None] * len(weights)
            later.leave(weights, lambda: starts)
        elif not later:
            wait_where_none(weights, to_weights)
        ctx.layer.done(start, "input_grad" if later else "backward")
        return None, None, None, None, *to_inputs, *to_weights


def _called(call, inputs, path):
    """Run the call; raise RuntimeError for a change in place that its node would hide."""
    constants = [tensor for tensor in inputs if not tensor.requires_grad]
    try:
        outputs = call(inputs)
    except RuntimeError as error:
        if "leaf Variable that requires grad is being used in an in-place" in str(error):
            raise _in_place(path) from error
        raise
    if any(tensor.requires_grad for tensor in constants):
        raise _in_place(path)
    return outputs


def _in_place(path):
    return RuntimeError(
        f"{path} changes in place an argument or a weight that needs a gradient, and outside the "
        "layer autograd would not see that: change a clone() of it, or write `x = x + y` for "
        "`x += y`"
    )


def _starts(weights, grads):
    return [pair for pair in zip(weights, grads, strict=True) if pair[1] is not None]


def _refuse_old_hooks(layer):
    if layer._backward_hooks and layer._is_full_backward_hook is False:
        raise TypeError(
            f"{layer._path} has a hook of register_backward_hook, which would see the gradients of "
            "the layer's node instead of its last operation: use register_full_backward_hook"
        )


def _refuse_open_graph(ctx):
    """Raise ValueError if a gradient would bypass the layer's node, and so be lost.

    Also raise it where torch would crash; if only two traversals would crash, set `ctx.once`.
    """
    nodes = [edge.node for edge in ctx.edges if edge]
    ctx.once |= has_group_norm(nodes, ctx.layer._path)
    stranger = find_stranger(nodes, [*ctx.inputs, *ctx.weights]) if nodes else None
    if stranger is not None:
        raise ValueError(
            f"{ctx.layer._path} uses a tensor of shape {tuple(stranger.shape)} that requires a "
            "gradient and is neither an argument nor a parameter of this layer: the gradient would "
            "be lost; pass the tensor as an argument, or register it as a parameter"
        )
    for tensor in ctx.inputs:
        if tensor.requires_grad:  # autograd adds to its `.grad` only if a path bypasses the node
            tensor.register_post_accumulate_grad_hook(partial(_refuse_use, ctx.layer._path))


def _refuse_use(path, _):
    raise RuntimeError(
        f"a tensor made inside {path} was used outside that layer, for example by a hook on one of "
        "its submodules: the gradient would end at the layer's inputs; return the tensor from the "
        "layer, or register the hook on the layer itself"
    )


class SplittableLinear(Splittable):
    """A `Splittable` for `nn.Linear`: each part is one product, and no graph is traversed twice.

    It works like any other layer under autocast, which casts before the product; for subclasses of
    tensors; and if its weight or bias is computed (spectral norm, pruning).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return `input @ weight.T + bias`."""
        is_plain = {"weight", "bias"} <= self._parameters.keys() and type(input) is torch.Tensor
        if not is_plain or has_autocast(input.device.type):
            return super().forward(input)
        _refuse_old_hooks(self)
        return _Linear.apply(self, input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, weight, bias):
        ctx.layer, ctx.weights = layer, (weight, bias)
        ctx.save_for_backward(x, weight)
        # `.data`, because the next layer could not change a view of the product in place.
        return nn.functional.linear(x, weight, bias).data

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad

        @torch.no_grad()
        def to_weights():
            rows = grad.reshape(-1, grad.shape[-1])
            with without_autocast(grad.device.type):  # the forward had none
                return (
                    rows.t() @ x.reshape(-1, x.shape[-1]).conj() if wants_weight else None,
                    rows.sum(0) if wants_bias else None,
                )

        with without_autocast(grad.device.type):
            to_x, later = grad @ weight.conj() if wants_x else None, ctx.layer.later
        if later is None:
            return None, to_x, *to_weights()
        trained = [param for param in ctx.weights if param is not None and param.requires_grad]
        later.leave(trained, lambda: _starts(ctx.weights, to_weights()), is_own=True)
        return None, to_x, None, None
