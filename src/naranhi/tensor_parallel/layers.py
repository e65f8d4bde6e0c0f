"""Linear layers split by columns and by rows, which are used in pairs.

A column-parallel layer computes some of the outputs from all inputs. A row-parallel layer computes
a partial sum of all outputs from some of the inputs. The outputs of the first are the inputs of the
second. So the two, with an activation or attention heads between them, need one all-reduce in the
forward (after the second) and one in the backward (before the first).

Each is built from an unsplit layer, of which it keeps this rank's shard: an `nn.Linear`, or GPT-2's
`Conv1D`, whose weight is (inputs, outputs). `group` is the process group, None for the default one.

With `sequence`, activations outside are split along the sequence, (batch, sequence / ranks, hidden)
on each rank. The all-reduces then become pairs of reduce-scatter and all-gather, with the same
number of bytes, and the first layer's backward gathers its inputs once more.

A backward that is split in two (`split_backward`) runs through a layer twice. With `sequence`, the
layer's backward then communicates twice; without `sequence`, once, with the inputs' gradients.

Sources: Shoeybi et al. (2019), section 3; Korthikanti et al. (2022), section 4.2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from naranhi.autograd import Splittable
from naranhi.autograd.autocast import as_autocast
from naranhi.autograd.splitting import as_kind
from naranhi.tensor_parallel.layer_checks import is_conv1d, require_linear
from naranhi.tensor_parallel.mappings import (
    copy_to_group,
    reduce_from_group,
    reduce_scatter_to_sequence,
    start_gather,
    start_reduce,
    start_reduce_scatter,
)
from naranhi.tensor_parallel.shards import ShardedModule, Split


class ColumnParallelLinear(ShardedModule):
    """Compute this rank's outputs of a linear layer: (..., inputs) to (..., outputs / ranks).

    Inputs are the same on every rank; with `sequence`, (..., sequence / ranks, inputs) are
    all-gathered first. If the outputs are needed whole, `gather_from_group` concatenates them.

    Args:
        linear: the unsplit layer, an `nn.Linear` or GPT-2's `Conv1D`.
        group: the process group; None for the default one.
        parts: see `Split`; 3 for a layer that computes queries, keys and values together.
        sequence: whether inputs are split along the sequence.
        pad: whether to pad the outputs with zeros if the ranks do not divide them; only with one
            part.

    Raises:
        ValueError: the ranks do not divide the outputs of each part, or hooks or a parametrization
            would be lost.
        TypeError: another kind of layer, including a subclass.
    """

    transposed: bool
    sends: bool

    def __init__(
        self,
        linear: nn.Module,
        group: dist.ProcessGroup | None = None,
        parts: int = 1,
        sequence: bool = False,
        pad: bool = False,
    ):
        super().__init__(group, sequence)
        require_linear(linear)
        self.transposed, self.sends = is_conv1d(linear), True
        dim = 1 if self.transposed else 0
        outputs = linear.weight.shape[dim]
        if outputs % (parts * self.ranks) and not (pad and parts == 1):
            each = f", in {parts} parts" if parts > 1 else ""
            raise ValueError(f"{self.ranks} ranks do not divide {outputs} outputs{each}")
        self.take("weight", linear.weight, Split(dim, outputs, self.ranks, parts))
        self.take("bias", linear.bias, Split(0, outputs, self.ranks, parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs."""
        return self.product(x, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Run the forward with this bias instead of the layer's own."""
        if not self.sends:
            return _linear(x, self.weight, bias, self.transposed)
        function = _SequenceColumn if self.sequence else ColumnFunction
        tensors = as_autocast(x, self.weight, bias)
        return function.apply(*tensors, self.transposed, self.group)

    def as_splittable(self) -> nn.Module:
        """Make this layer's backward splittable in two, in place, and return the layer."""
        # With `sequence`, a gather outside the layer would keep the whole input until the weights'
        # gradients.
        self.sends = self.sequence
        return as_kind(Splittable if self.sequence else SplittableColumn, self)


class SplittableColumn(Splittable):
    """Keep a column-parallel layer's all-reduce out of the part that a split backward runs twice.

    The all-reduce follows the inputs' gradients, once.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs."""
        return super().forward(copy_to_group(x, self.group))


class RowParallelLinear(ShardedModule):
    """Compute a linear layer from this rank's inputs: (..., inputs / ranks) to (..., outputs).

    The outputs are the same on every rank; with `sequence`, they are (..., sequence / ranks,
    outputs).

    Args:
        linear: the unsplit layer, an `nn.Linear` or GPT-2's `Conv1D`.
        group: the process group; None for the default one.
        sequence: whether outputs are split along the sequence.

    Raises:
        ValueError: the ranks do not divide the inputs, or hooks or a parametrization would be lost.
        TypeError: another kind of layer, including a subclass.
    """

    def __init__(
        self,
        linear: nn.Module,
        group: dist.ProcessGroup | None = None,
        sequence: bool = False,
    ):
        super().__init__(group, sequence)
        require_linear(linear)
        self.transposed: bool = is_conv1d(linear)
        dim = 0 if self.transposed else 1
        inputs = linear.weight.shape[dim]
        if inputs % self.ranks:
            raise ValueError(f"{self.ranks} ranks do not divide {inputs} inputs")
        self.take("weight", linear.weight, Split(dim, inputs, self.ranks))
        self.take("bias", linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' products, plus the bias."""
        # Add the bias after the sum, or every rank would add it once.
        summed = reduce_scatter_to_sequence if self.sequence else reduce_from_group
        y = summed(x @ _in_by_out(self.weight, self.transposed), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ColumnFunction(Function):
    """Compute `linear(copy_to_group(x))`, with the backward's all-reduce overlapped.

    The backward computes the weight's gradient while the all-reduce of the input's gradient is in
    flight.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Return the product with this rank's columns, and save its factors."""
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.group = transposed, group
        # No view, which the next layer could not change in place.
        return _linear(x, weight, bias, transposed).data

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input, weight and bias; the input's is summed over the group."""
        x, weight = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[:3]
        if wants_x:
            to_x = gradient @ _in_by_out(weight, ctx.transposed).mH
            summed = start_reduce(to_x, ctx.group)
        own = _weight_gradients(x, gradient, ctx.transposed, *wants)
        return summed() if wants_x else None, *own, None, None


class _SequenceColumn(Function):
    """Compute `linear(gather_from_sequence(x))`, with the backward overlapped in the same way.

    It saves only this rank's part of x, and gathers x again for the weight's gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, transposed, group):
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.group = transposed, group
        return _linear(start_gather(x, group, -2)(), weight, bias, transposed).data

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[:3]
        gathered = start_gather(x, ctx.group, -2)
        if wants_x:
            to_x = gradient @ _in_by_out(weight, ctx.transposed).mH
            summed = start_reduce_scatter(to_x, ctx.group, -2)
        own = _weight_gradients(gathered(), gradient, ctx.transposed, *wants)
        return summed() if wants_x else None, *own, None, None


def _linear(x, weight, bias, transposed):
    return F.linear(x, weight.t() if transposed else weight, bias)


def _in_by_out(weight, transposed):
    return weight if transposed else weight.t()


def _weight_gradients(x, gradient, transposed, wants_weight, wants_bias):
    """Return the gradients of the weight, in the weight's layout, and of the bias, or None."""
    # x may be a single row.
    x, gradient = (tensor.unsqueeze(0).flatten(0, -2) for tensor in (x, gradient))
    to_weight = None
    if wants_weight:
        to_weight = x.mH @ gradient if transposed else gradient.t() @ x.conj()
    return to_weight, gradient.sum(0) if wants_bias else None
