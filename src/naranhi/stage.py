"""One stage of a pipeline on its rank: its layers, and what it keeps of each micro-batch under way.

A forward keeps its input, and of its output only the place in the graph. The output itself may go
as soon as it has been sent: a backward that needs it has saved it.
"""

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge


class Stage(nn.Module):
    """Layers, of which each takes what the one before returns: a tensor or a tuple of tensors.

    first: the model's number of the first layer. loss: on the last stage `loss(output, target)`, a
    scalar tensor; None on the others.
    """

    def __init__(self, layers, first, loss=None):
        super().__init__()
        self.layers, self.first, self.loss = nn.ModuleList(layers), first, loss
        self.total, self._kept = None, {}

    def begin(self):
        """Forget what an earlier step has left."""
        self.total, self._kept = None, {}

    def run_forward(self, microbatch, tensors, takes, target, count):
        """The outputs, a list of tensors without their graph; on the last stage, the loss.

        tensors: the inputs, as `takes` (a `shapes.Boundary`) says. count: what the loss is divided
        by; the sum of these losses over the micro-batches is `total`.
        """
        for tensor, spec in zip(tensors, takes.specs, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        value = takes.value(tensors)
        for layer in self.layers:
            value = layer(value)
        if self.loss:
            value = self.loss(value, target) / count
            self.total = value.detach() if self.total is None else self.total + value.detach()
        outputs = value if isinstance(value, tuple) else (value,)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        edges = [get_gradient_edge(output) for output in outputs if output.requires_grad]
        self._kept[microbatch] = wanted, edges
        return [output.detach() for output in outputs]

    def run_backward(self, microbatch, gradients):
        """The gradients of the inputs; those of the weights are added to their `.grad`.

        gradients: those of the outputs that have one; on the last stage None.
        """
        inputs, edges = self._kept.pop(microbatch)
        if self.loss:
            gradients = [torch.ones_like(self.total)] * len(edges)
        if edges:
            torch.autograd.backward(edges, gradients)
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs]
