"""Record every layer's outputs in a step, their gradients, and the random masks it draws.

The records of a step are copies on the CPU of every layer's outputs and of their gradients: several
times the memory that autograd saves for a backward. So record a step with a small batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from naranhi.autograd.hooks import ModuleHook

PHASES = "data", "mask", "forward", "backward", "gradient", "norm", "step", "weights"


class Key(NamedTuple):
    """The name of a tensor of a step.

    Args:
        phase: one of `PHASES`.
        layer: the name of a layer, or of a parameter, in the unsplit model.
        microbatch: the micro-batch's number; 0 for a tensor that exists once in a step.
        part: which of the tensors that the layer returns in a micro-batch.
    """

    phase: str
    layer: str
    microbatch: int = 0
    part: int = 0


class Recorder:
    """Hooks on a model's layers that record a step while this context is entered.

    Args:
        layers: {name: module}.
        first: the name of the layer that takes the batch; None for the first that is called.
        masks: whether to record the masks that dropout draws.

    Attributes:
        layers: {name: module}.
        first: the name of the layer that takes the batch.
        inputs: the tensors that each call of the first layer takes, in order, but for numbers.
        outputs: {layer: the tensors that each of its calls returns}.
        gradients: {layer: {(call, number of the tensor): gradient}}.
        masks: {first part of the layer's name: [(layer, mask) in the order they are drawn]}; masks
            that are drawn outside of all layers are left out.
        expects: (layer, call, number of the tensor) of each output that may receive a gradient.
        backward_order: the same for the gradients, in the order in which they were computed.
    """

    layers: Mapping[str, nn.Module]
    first: str | None
    expects: set[tuple[str, int, int]]
    backward_order: list[tuple[str, int, int]]
    inputs: list[list[torch.Tensor]]
    outputs: dict[str, list[list[torch.Tensor]]]
    gradients: dict[str, dict[tuple[int, int], torch.Tensor]]
    masks: dict[str, list[tuple[str, torch.Tensor]]]

    def __init__(self, layers: Mapping[str, nn.Module], first: str | None, masks: bool) -> None:
        self.layers, self.first = layers, first
        self.inputs, self.outputs, self.gradients, self.masks = [], {}, {}, {}
        self.expects, self.backward_order = set(), []
        self._running, self._handles = [], []
        self._draws = Draws(self._drawn) if masks else None

    def __enter__(self) -> Self:
        for name, layer in self.layers.items():
            before, after = ModuleHook(self._before, name), ModuleHook(self._after, name)
            self._handles += [
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(after, always_call=True),
            ]
        if self._draws:
            self._draws.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._draws:
            self._draws.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    @property
    def microbatches(self) -> int:
        """Return the number of micro-batches: the number of calls of the first layer."""
        calls = self.outputs.get(self.first) if self.first in self.outputs else None
        calls = calls or next(iter(self.outputs.values()), [])
        return len(calls)

    def values(self) -> dict[Key, torch.Tensor]:
        """Return the recorded outputs and gradients, in the order in which they were computed."""
        return {
            key: tensor for phase in (self._forward(), self._backward()) for key, tensor in phase
        }

    def _forward(self):
        for layer, calls in self.outputs.items():
            for call, tensors in enumerate(calls):
                for number, tensor in enumerate(tensors):
                    yield self.key("forward", layer, call, number), tensor

    def _backward(self):
        for layer, call, number in self.backward_order:
            gradient = self.gradients[layer][call, number]
            yield self.key("backward", layer, call, number), gradient

    def key(self, phase: str, layer: str, call: int, number: int) -> Key:
        """Return the key of a call's tensor; a micro-batch may call a layer several times."""
        calls = self.outputs[layer]
        uses = max(len(calls) // max(self.microbatches, 1), 1)
        microbatch, use = divmod(call, uses)
        return Key(phase, layer, microbatch, use * len(calls[call]) + number)

    def missing(self) -> list[Key]:
        """Return the keys of outputs that received no gradient, although autograd was enabled."""
        return [
            self.key("backward", layer, call, number)
            for layer, call, number in sorted(self.expects)
            if (call, number) not in self.gradients.get(layer, {})
        ]

    def _before(self, name, module, args, kwargs):
        tensors = _tensors((args, kwargs))
        if _not_a_step(tensors):
            return
        self._running.append(name)
        if self.first is None:
            self.first = name
        if name == self.first:
            rows = [tensor for tensor in tensors if tensor.dim()]
            self.inputs.append([tensor.detach().to("cpu", copy=True) for tensor in rows])

    def _after(self, name, module, args, output):
        tensors = _tensors(output)
        if not self._running or self._running[-1] != name or _not_a_step(tensors):
            return
        self._running.pop()
        calls = self.outputs.setdefault(name, [])
        for number, tensor in enumerate(tensors):
            if torch.is_grad_enabled():  # not in a forward to be recomputed
                self.expects.add((name, len(calls), number))
            if tensor.requires_grad:
                tensor.register_hook(partial(self._got_gradient, name, len(calls), number))
        calls.append([tensor.detach().to("cpu", copy=True) for tensor in tensors])

    def _got_gradient(self, name, call, number, gradient):
        gradients = self.gradients.setdefault(name, {})
        if (call, number) not in gradients:  # a split backward runs through a layer twice
            gradients[call, number] = gradient.detach().to("cpu", copy=True)
            self.backward_order.append((name, call, number))

    def _drawn(self, mask):
        if not self._running:  # such as in a pipeline's dry run, which one process does not have
            return
        layer = self._running[-1]
        self.masks.setdefault(layer.split(".")[0], []).append((layer, mask))


class Draws(TorchDispatchMode):
    """A dispatch mode that calls `record(mask)` for every mask that dropout draws in a forward.

    Dropout on a CPU draws by `bernoulli_`; a GPU's dropout is one operation that returns the mask.
    """

    def __init__(self, record: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation.__name__.split(".")[0]
        if name in ("bernoulli_", "native_dropout") and not _not_a_step(tree_leaves(result)):
            mask = result[1] if name == "native_dropout" else result
            self.record(mask.detach().bool().cpu())
        return result


def row_size(mask: torch.Tensor) -> int:
    """Return how many elements of a mask are for one row of the batch."""
    return mask.shape[1:].numel()


def _tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _not_a_step(tensors):
    """Return whether a layer runs on shapes only, or once more in a backward (recomputation)."""
    shapes = any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)
    return shapes or torch._C._current_graph_task_id() != -1
