"""One stage of a pipeline on its rank: its layers, and what it keeps of each micro-batch under way.

A forward keeps its input, and of its output only the place in the graph. The output itself may go
as soon as it has been sent: a backward that needs it has saved it.
"""

from contextlib import nullcontext

import torch
from torch import nn

from naranhi.autograd import Splittable
from naranhi.pipeline.shape_inference import StageSignature, name_of, require_values


class Stage(nn.Module):
    """Layers, of which each takes what the one before returns: a tensor or a tuple of tensors.

    first: the model's number of the first layer. loss: on the last stage `loss(output, target)`, a
    scalar tensor; None on the others. weights: a `weight_stash.WeightStash` where the schedule
    updates them on its way; None where they stay the same.
    """

    def __init__(self, layers, first, loss=None):
        super().__init__()
        self.layers, self.first, self.loss = nn.ModuleList(layers), first, loss
        self.weights, self._own = None, list(self.layers.parameters())
        self._splittable = [one for one in self.layers.modules() if isinstance(one, Splittable)]
        self.begin()

    def begin(self):
        """Forget what an earlier step has left."""
        self.total, self.losses, self._kept, self._later = None, {}, {}, {}
        if self.weights:
            self.weights.begin()

    def _reading(self, version):
        return self.weights.reading(version) if self.weights else nullcontext()

    def run_forward(self, microbatch, tensors, takes, gives, target, count, version=0):
        """The outputs, a list of tensors without their graph; on the last stage, the loss.

        tensors: the inputs, as `takes` says, and the outputs are to be as `gives` says (both a
        `shape_inference.StageSignature`). count: what the loss is divided by. `losses` has the
        quotient by micro-batch, and `total` is their sum.
        """
        for tensor, spec in zip(tensors, takes.specs, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        value = taken = takes.value(tensors)
        with self._reading(version):
            for number, layer in enumerate(self.layers, self.first):
                value = layer(value)
                require_values(value, number, layer)
        takes.note_changes(taken, tensors)
        if self.loss:
            value = self.loss(value, target) / count
            self.losses[microbatch] = one = value.detach()
            self.total = one if self.total is None else self.total + one
            gives = StageSignature.of(value)
        gives.require(value, number, layer)
        edges, outputs = gives.edges(value), gives.detached(value)
        self._kept[microbatch] = [x for x in tensors if x.requires_grad], edges, version
        return outputs

    def run_backward(self, microbatch, gradients):
        """The gradients of the inputs; those of the weights are added to their `.grad`.

        gradients: those of the outputs that have one; on the last stage None.
        """
        inputs, edges, version = self._kept.pop(microbatch)
        if self.loss:
            gradients = [torch.ones_like(self.total)] * len(edges)
        pairs = [pair for pair in zip(edges, gradients, strict=True) if pair[0]]
        own = self.weights.versions[version] if self.weights else self._own
        new = [weight for weight in own if weight.grad is None]
        if not pairs:
            return [torch.zeros_like(one) for one in inputs]
        with self._reading(version):
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            # A bias that has the input's shape may have been given the very tensor that is sent:
            # the next micro-batch's gradient must not be added to that.
            taken = {
                self._dense(weight).untyped_storage().data_ptr()
                for weight in new
                if weight.grad is not None
            }
        found = [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs]
        return [one.clone() if one.untyped_storage().data_ptr() in taken else one for one in found]

    def _dense(self, weight):
        """The gradient of a weight, or ValueError if it is sparse."""
        if weight.grad.layout is not torch.strided:
            number, name = next(
                (number, name)
                for number, layer in enumerate(self.layers)
                for name, parameter in layer.named_parameters()
                if parameter is weight
            )
            raise ValueError(
                f"{name_of(self.first + number, self.layers[number])}: the gradient of {name} is "
                "sparse, which a pipeline cannot sum; compute a dense one"
            )
        return weight.grad

    def run_input_grad(self, microbatch, gradients):
        """`run_backward` without the weights' part, which `run_weight_grad` does."""
        later, version = [], self._kept[microbatch][2]
        for layer in self._splittable:
            layer.defer = later.append
        try:
            return self.run_backward(microbatch, gradients)
        finally:
            self._later[microbatch] = later, version
            for layer in self._splittable:
                layer.defer = None

    def run_weight_grad(self, microbatch):
        """What `run_input_grad` has left for later."""
        later, version = self._later.pop(microbatch)
        with self._reading(version):
            for add_gradients in later:
                add_gradients()
