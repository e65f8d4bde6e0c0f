"""One stage of a pipeline: its layers, and what it keeps of each micro-batch in flight.

A forward keeps its input, and of its output only the edge in the autograd graph. The output itself
may be freed as soon as it has been sent: a backward that needs it has saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from naranhi.autograd import Splittable
from naranhi.autograd.autocast import without_autocast
from naranhi.pipeline.shape_inference import require_values
from naranhi.pipeline.stage_signature import StageSignature, name_of

if TYPE_CHECKING:
    from naranhi.pipeline.weight_stash import WeightStash


class Stage(nn.Module):
    """Layers of which each takes what the previous one returns: a tensor or a tuple of tensors.

    Args:
        layers: the layers of this stage.
        first: the index of the first layer in the model.
        loss: on the last stage `loss(output, target)`, a scalar tensor; None on the others.

    Attributes:
        weights: a `weight_stash.WeightStash` if the schedule updates the weights within a step;
            None if they stay the same.
        losses: the loss of each micro-batch, divided by its count.
        total: the sum of `losses`, None before the first.
    """

    layers: nn.ModuleList
    first: int
    loss: Callable[..., torch.Tensor] | None
    weights: WeightStash | None
    losses: dict[int, torch.Tensor]
    total: torch.Tensor | None

    def __init__(
        self,
        layers: Iterable[nn.Module],
        first: int,
        loss: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.layers, self.first, self.loss = nn.ModuleList(layers), first, loss
        self.weights, self._names = None, self._parameter_names()
        self._splittable = [
            module for module in self.layers.modules() if isinstance(module, Splittable)
        ]
        self.begin()

    def begin(self) -> None:
        """Discard what an earlier step has left."""
        self.total, self.losses, self._kept, self._later = None, {}, {}, {}
        self._own = list(self.parameters())
        if self.weights:
            self.weights.begin()

    def require_same_parameters(self) -> None:
        """Raise RuntimeError if a parameter has been replaced since the stage was made.

        Weight versions and ties to other ranks are those of the parameters at that time.
        """
        now = set(self.parameters())
        for parameter, name in self._names.items():
            if parameter not in now:
                raise RuntimeError(
                    f"{name} was replaced since the Pipeline was made (by "
                    "load_state_dict(assign=True) or to_empty(), say): make a new Pipeline, or "
                    "copy the values into the parameter"
                )

    def named_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name in the whole model, module): each layer, then "loss_fn" if it is a module."""
        for number, layer in enumerate(self.layers, self.first):
            yield str(number), layer
        if isinstance(self.loss, nn.Module):
            yield "loss_fn", self.loss

    def _parameter_names(self):
        parts = [(name_of(n, layer), layer) for n, layer in enumerate(self.layers, self.first)]
        if isinstance(self.loss, nn.Module):
            parts.append(("the loss", self.loss))
        return {
            parameter: f"{name} of {part}"
            for part, module in parts
            for name, parameter in module.named_parameters()
        }

    def _reading(self, version):
        return self.weights.reading(version) if self.weights else nullcontext()

    def run_forward(
        self,
        microbatch: int,
        tensors: list[torch.Tensor],
        takes: StageSignature,
        gives: StageSignature,
        target: torch.Tensor | tuple[torch.Tensor, ...] | None,
        count: float,
        version: int = 0,
    ) -> list[torch.Tensor]:
        """Run the forward of a micro-batch; return its outputs, or the loss, without their graph.

        On the last stage, `losses` receives the loss divided by `count`, and `total` is the sum of
        `losses`.

        Args:
            microbatch: the number of the micro-batch.
            tensors: the inputs.
            takes: the signature of the inputs.
            gives: the signature that the outputs must have.
            target: the target of the micro-batch, on the last stage.
            count: what the loss is divided by.
            version: the version of the weights to read.

        Raises:
            TypeError: a layer returns anything but tensors, or the loss anything but a tensor.
            ValueError: the outputs are not as in the trial, or the loss is not a scalar.
        """
        for tensor, spec in zip(tensors, takes.specs, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        value = taken = takes.value(tensors)
        with self._reading(version):
            for number, layer in enumerate(self.layers, self.first):
                value = layer(value)
                require_values(value, number, layer)
            takes.note_changes(taken, tensors)
            if self.loss:  # which may have weights, too
                value = require_scalar(self.loss(value, target)) / count
        if self.loss:
            self.losses[microbatch] = loss = value.detach()
            self.total = loss if self.total is None else self.total + loss
            gives = StageSignature.of(value)
        gives.require(value, number, layer)
        edges, outputs = gives.edges(value), gives.detached(value)
        self._kinds = {"cpu", outputs[0].device.type}  # whose autocast a backward must not have
        self._kept[microbatch] = [x for x in tensors if x.requires_grad], edges, version
        return outputs

    def run_backward(
        self, microbatch: int, gradients: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Run the backward of a micro-batch, and return the gradients of the inputs.

        The gradients of the weights are added to their `.grad`. A backward runs without autocast,
        in the dtypes that its forward has chosen.

        Args:
            microbatch: the number of the micro-batch.
            gradients: the gradients of the outputs that have one; None on the last stage.
        """
        inputs, edges, version = self._kept.pop(microbatch)
        if self.loss:
            gradients = [torch.ones_like(self.total)] * len(edges)
        pairs = [pair for pair in zip(edges, gradients, strict=True) if pair[0]]
        if not pairs:
            return [torch.zeros_like(tensor) for tensor in inputs]
        own = [*self._own, *(self.weights.versions[version] if self.weights else ())]
        new = [weight for weight in own if weight.grad is None]
        with self._reading(version), without_autocast(*self._kinds):
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            grads = [self._dense(weight) for weight in new if weight.grad is not None]
        storages = {grad.untyped_storage().data_ptr() for grad in grads}
        return [gradient_to_send(tensor, storages) for tensor in inputs]

    def _dense(self, weight):
        """Return the gradient of a weight, or raise ValueError if it is sparse."""
        if weight.grad.layout is not torch.strided:
            name = self._parameter_names().get(weight) or self._names[weight]
            raise ValueError(
                f"the gradient of {name} is sparse, which a pipeline cannot sum; compute a dense "
                "one"
            )
        return weight.grad

    def run_input_grad(
        self, microbatch: int, gradients: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Do as `run_backward`, but leave the gradients of the weights to `run_weight_grad`."""
        later, version = [], self._kept[microbatch][2]
        for layer in self._splittable:
            layer.defer = later.append
        try:
            return self.run_backward(microbatch, gradients)
        finally:
            self._later[microbatch] = later, version
            for layer in self._splittable:
                layer.defer = None

    def run_weight_grad(self, microbatch: int) -> None:
        """Compute the gradients of the weights that `run_input_grad` has left."""
        later, version = self._later.pop(microbatch)
        with self._reading(version), without_autocast(*self._kinds):
            for add_gradients in later:
                add_gradients()


def require_scalar(loss: object) -> torch.Tensor:
    """Return the loss of a micro-batch.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it has more than one element, or none.
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}, not a scalar tensor: return only the sum of "
            "the losses of a micro-batch"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}, not a scalar: return the sum "
            "of the losses of a micro-batch"
        )
    return loss


def gradient_to_send(tensor: torch.Tensor, storages: set[int]) -> torch.Tensor:
    """Return an input's gradient, or zeros if it has none.

    The gradient of a bias with the input's shape may be the very tensor that is sent. The next
    micro-batch's gradient is added to that tensor in place, so a copy is sent.

    Args:
        tensor: an input of the stage.
        storages: the addresses of the storages of the weights' gradients that are new.
    """
    if tensor.grad is None:
        return torch.zeros_like(tensor)
    shared = tensor.grad.untyped_storage().data_ptr() in storages
    return tensor.grad.clone() if shared else tensor.grad
