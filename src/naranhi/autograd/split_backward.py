"""The backward in two parts: the inputs' gradients at once, the weights' whenever there is time.

The stage before waits for the gradient of a stage's input. Nobody waits for the gradients of its
weights but the optimizer: a zero-bubble schedule computes them where it would otherwise sit idle.

A `Splittable` layer is one node in autograd's graph, and holds the layer's own graph inside. Its
backward goes through that graph once for the inputs, and hands on a function that goes through it
once more for the weights. So nothing is computed twice where a layer is a single operation, such as
a product or a norm: `splittable` makes a model's layers such nodes at that depth.

Source: Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism" (2024), section 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from naranhi.autograd.calls import Call, find_stranger
from naranhi.autograd.module_hooks import is_compiled
from naranhi.autograd.parameter_hooks import at_rest, wait_where_none
from naranhi.autograd.weight_gradients import Later, Sharing
from naranhi.autograd.wrapper import Wrapper


class Splittable(Wrapper):
    """A layer whose backward can leave the gradients of its weights for later.

    While `defer` is a function, and not None, a backward computes the inputs' gradients only, and
    calls `defer` with another function; calling that adds the weights' gradients to `.grad`.
    Otherwise the backward does both. Results and gradients are the layer's own. Set `defer` anew
    for each backward.

    Hooks of the layer's parameters run once for each backward, with the weights' part. Where the
    layer's own graph has hooks (of modules in the layer, or that its forward registers on tensors),
    or a module in it is compiled, the graph is gone through once: all gradients are computed with
    the inputs' part, and the weights' part adds them.

    Args:
        layer: takes and returns tensors, also in tuples, lists, dicts and dataclasses.

    Raises:
        TypeError: when the layer returns anything else, or has a hook of the deprecated
            `register_backward_hook`.
        ValueError: when the layer uses a tensor whose gradient would be lost.
    """

    _later, _sharing = None, None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self._path = type(layer).__name__

    def forward(self, *args, **kwargs):
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
        return self._later and self._later.defer

    @defer.setter
    def defer(self, function: Callable[[Callable[[], None]], None] | None) -> None:
        if self._later:
            self._later.end()
        # nn.Module's own way to set an attribute takes as long as a small layer.
        vars(self)["_later"] = Later(function, self._path, self.done) if function else None

    @property
    def later(self) -> Later | None:
        """Where a backward leaves the gradients of the weights; None while it is to be whole."""
        return self._sharing.join(self._later) if self._sharing and self._later else self._later

    def done(self, start: float, what: str) -> None:
        """Called when a part is done that began at `start`, by perf_counter: "forward", "backward",
        or of that "input_grad" or "weight_grad"."""


class SplitFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, call, with_graph, count, *tensors):
        start, handles = perf_counter(), RemovableHandle.next_id
        inputs = [
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors[:count]
        ]
        with torch.set_grad_enabled(with_graph):
            outputs = call(inputs)
        ctx.layer, ctx.inputs, ctx.weights = layer, inputs, tensors[count:]
        # Whatever was registered meanwhile, of whatever kind, is not to run in two backwards.
        ctx.once = RemovableHandle.next_id != handles or any(map(is_compiled, layer.modules()))
        # Of the outputs only their place in the graph is needed: their storage may go.
        ctx.edges = [
            get_gradient_edge(output) if output.requires_grad else None for output in outputs
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
    def backward(ctx, *grads):
        start = perf_counter()
        layer, inputs, weights, later = ctx.layer, ctx.inputs, ctx.weights, ctx.layer.later
        used = [
            (edge, grad)
            for edge, grad in zip(ctx.edges, grads, strict=True)
            if edge is not None and grad is not None
        ]

        def gradients_of(tensors, keep):
            """None for a tensor that requires none."""
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            if not (used and wanted):
                return [None] * len(tensors)
            edges, given = zip(*used, strict=True)
            with at_rest(weights):  # their hooks run where the gradients are added to `.grad`
                found = iter(
                    torch.autograd.grad(edges, wanted, given, retain_graph=keep, allow_unused=True)
                )
            return [next(found) if tensor.requires_grad else None for tensor in tensors]

        if later and not ctx.once:
            to_inputs, to_weights = gradients_of(inputs, True), [None] * len(weights)
            later.leave(weights, lambda: used)
        else:
            kept = torch._C._autograd._get_current_graph_task_keep_graph()
            both = gradients_of([*inputs, *weights], kept)
            to_inputs, to_weights = both[: len(inputs)], both[len(inputs) :]
        if later and ctx.once:
            starts, to_weights = _starts(weights, to_weights), [None] * len(weights)
            later.leave(weights, lambda: starts)
        elif not later:
            wait_where_none(weights, to_weights)
        layer.done(start, "input_grad" if later else "backward")
        return None, None, None, None, *to_inputs, *to_weights


def _starts(weights, grads):
    return [pair for pair in zip(weights, grads, strict=True) if pair[1] is not None]


def _refuse_old_hooks(layer):
    if layer._backward_hooks and layer._is_full_backward_hook is False:
        raise TypeError(
            f"{layer._path} has a hook of register_backward_hook, which would see the gradients of "
            "the layer's node instead of its last operation: use register_full_backward_hook"
        )


def _refuse_open_graph(ctx):
    """Raise ValueError where a gradient would go past the layer's node, and so be lost."""
    nodes = [edge.node for edge in ctx.edges if edge]
    stranger = find_stranger(nodes, [*ctx.inputs, *ctx.weights]) if nodes else None
    if stranger is not None:
        raise ValueError(
            f"{ctx.layer._path} uses a tensor of shape {tuple(stranger.shape)} that requires a "
            "gradient and is neither in its arguments nor a parameter of its own: its gradient "
            "would be lost; pass it as an argument, or register it as a parameter"
        )
    for tensor in ctx.inputs:
        if tensor.requires_grad:  # autograd adds to its `.grad` only by another way than the node
            tensor.register_post_accumulate_grad_hook(partial(_refuse_use, ctx.layer._path))


def _refuse_use(path, _):
    raise RuntimeError(
        f"a tensor from within {path} was used outside of it, by a hook on a module within, say: "
        "its gradient would end at the layer's inputs; return the tensor from the layer, or "
        "register the hook on the layer itself"
    )


class SplittableLinear(Splittable):
    """A `Splittable` for `nn.Linear`: each part is one product, and no graph is gone through twice.

    It is like any other layer under autocast, which casts before the product, and where its weight
    or bias is computed from something else (spectral norm, pruning).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        is_plain = {"weight", "bias"} <= self._parameters.keys() and type(input) is torch.Tensor
        if not is_plain or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        _refuse_old_hooks(self)
        return _Linear.apply(self, input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, weight, bias):
        ctx.layer, ctx.weights = layer, (weight, bias)
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad

        @torch.no_grad()
        def to_weights():
            rows = grad.reshape(-1, grad.shape[-1])
            return (
                rows.t() @ x.reshape(len(rows), -1) if wants_weight else None,
                rows.sum(0) if wants_bias else None,
            )

        to_x, later = grad @ weight if wants_x else None, ctx.layer.later
        if later is None:
            return None, to_x, *to_weights()
        trained = [param for param in ctx.weights if param is not None and param.requires_grad]
        later.leave(trained, lambda: _starts(ctx.weights, to_weights()), is_own=True)
        return None, to_x, None, None


def splittable(layers: list[nn.Module]) -> list[nn.Module]:
    """Make each module in the layers that has weights of its own a `Splittable` one, in place.

    A module stays the same object, with its names, attributes, hooks and parameters; its class is
    replaced by one that is derived from it, as `torch.distributed.fsdp.fully_shard` does. Two kinds
    of modules are replaced by others: compiled or scripted ones are wrapped, and one that has a
    better way to be splittable returns it from a method `as_splittable()`.

    Returns:
        The layers, for a `Pipeline`.
    """
    replaced = {}
    layers = [
        _made_splittable(layer, f"layer {number}", replaced) for number, layer in enumerate(layers)
    ]
    users = defaultdict(set)
    for layer in layers:
        for module in layer.modules():
            for param in module.parameters() if isinstance(module, Splittable) else ():
                users[param].add(module)
    for modules in users.values():
        if len(modules) > 1:
            others = {module._sharing for module in modules if module._sharing}
            together = {
                module
                for some in users.values()
                for module in some
                if module in modules or module._sharing in others
            }
            sharing = Sharing()
            for module in together:
                module._sharing = sharing
    return layers


def _made_splittable(module, path, replaced):
    """Return what takes the module's place, and note it in `replaced`."""
    if isinstance(module, Splittable):
        return module
    if module in replaced:
        return replaced[module]
    name = f"{path} ({type(module).__name__})"
    has_weights = "parametrizations" in module._modules or any(
        True for _ in module.parameters(recurse=False)
    )
    if is_compiled(module) or (has_weights and "forward" in vars(module)):
        new = Splittable(module)
    elif hasattr(type(module), "as_splittable"):
        new = module.as_splittable()
    elif has_weights:
        is_linear = type(module).forward is nn.Linear.forward
        new = as_kind(SplittableLinear if is_linear else Splittable, module)
    else:
        for child, inner in list(module._modules.items()):
            if inner is not None:
                setattr(module, child, _made_splittable(inner, f"{path}.{child}", replaced))
        return module
    new._path = name
    replaced[module] = new
    return new


def as_kind(kind: type[Splittable], module: nn.Module) -> nn.Module:
    """Make a module one of this kind of `Splittable`, whose node runs the module's own forward."""
    module._path = type(module).__name__
    module.__class__ = _derived(kind, type(module))
    return module


@cache
def _derived(kind, own):
    """A class of this kind that has everything else from `own`, not from `Wrapper`."""
    return type(
        f"Splittable{own.__name__}",
        (kind, own),
        {
            "_own_forward": own.forward,
            "__init__": own.__init__,
            "__getattr__": own.__getattr__,
            "__module__": own.__module__,
            "__doc__": own.__doc__,
        },
    )


def not_splittable(layer: nn.Module) -> list[str]:
    """Return the names of a layer's weights whose gradient cannot be left for later."""
    covered = {
        id(weight)
        for module in layer.modules()
        if isinstance(module, Splittable)
        for weight in module.parameters()
    }
    return [
        name
        for name, weight in layer.named_parameters()
        if weight.requires_grad and id(weight) not in covered
    ]
