"""Linear layers cut by columns and by rows, and the attention between such a pair.

A column-parallel layer computes some of the outputs from all inputs, a row-parallel one a summand
of all outputs from some of the inputs. What the first puts out is what the second takes, so the
two, with an activation or attention heads between them, need one all-reduce in the forward (after
the second) and one in the backward (before the first).

Each is made of an unsplit layer, of which it takes this rank's part: an `nn.Linear`, or GPT-2's
`Conv1D`, whose weight is (inputs, outputs). `group` is the process group, None for the default one.

With `sequence`, activations outside are split along the sequence, (batch, sequence / ranks, hidden)
on each rank: the all-reduces become pairs of reduce-scatter and all-gather, which move as much.

A backward that is split in two (`split_backward`) goes through a layer twice. With `sequence`, what
a layer's backward sends is then sent twice; without, once, with the inputs' gradients.

Sources: Shoeybi et al. (2019), section 3; Korthikanti et al. (2022), section 4.2.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from naranhi.autograd import Splittable
from naranhi.autograd.split_backward import as_kind
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
    """This rank's outputs of a linear layer: (..., inputs) to (..., outputs / ranks).

    Inputs are the same on every rank; with `sequence`, (..., sequence / ranks, inputs) are gathered
    first. parts: see `Split`; 3 for queries, keys and values in one. pad: fill up outputs of one
    part with zeros. `gather_from_group` puts the outputs together, if they are needed whole.

    Raises ValueError when the ranks do not divide the outputs of each part, and where hooks or a
    parametrization would be lost; TypeError for another kind of layer, also a subclass.
    """

    def __init__(self, linear, group=None, parts=1, sequence=False, pad=False):
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

    def forward(self, x):
        return self.product(x, self.bias)

    def product(self, x, bias):
        """The forward, with this bias."""
        if not self.sends:
            return _linear(x, self.weight, bias, self.transposed)
        function = _SequenceColumn if self.sequence else ColumnFunction
        tensors = _as_autocast(x, self.weight, bias)
        return function.apply(*tensors, self.transposed, self.group)

    def as_splittable(self):
        # Of a sequence, all ranks' parts would have to be kept until the weights' gradients.
        self.sends = self.sequence
        return as_kind(Splittable if self.sequence else SplittableColumn, self)


class SplittableColumn(Splittable):
    """A column-parallel layer whose all-reduce is outside of what the backward goes through twice,
    after the inputs' gradients."""

    def forward(self, x):
        return super().forward(copy_to_group(x, self.group))


class RowParallelLinear(ShardedModule):
    """A linear layer of which this rank has some of the inputs: (..., inputs / ranks) to (...,
    outputs), the same on every rank; with `sequence`, (..., sequence / ranks, outputs).

    Raises ValueError when the ranks do not divide the inputs, and where hooks or a parametrization
    would be lost; TypeError for another kind of layer, also a subclass.
    """

    def __init__(self, linear, group=None, sequence=False):
        super().__init__(group, sequence)
        require_linear(linear)
        self.transposed = is_conv1d(linear)
        dim = 0 if self.transposed else 1
        inputs = linear.weight.shape[dim]
        if inputs % self.ranks:
            raise ValueError(f"{self.ranks} ranks do not divide {inputs} inputs")
        self.take("weight", linear.weight, Split(dim, inputs, self.ranks))
        self.take("bias", linear.bias)

    def forward(self, x):
        # The bias comes after the sum, or it would be added once for each rank.
        summed = reduce_scatter_to_sequence if self.sequence else reduce_from_group
        y = summed(x @ _in_by_out(self.weight, self.transposed), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ColumnFunction(Function):
    """`linear(copy_to_group(x))`, but the weight's gradient is computed while the all-reduce of the
    input's is under way."""

    @staticmethod
    def forward(ctx, x, weight, bias, transposed, group):
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.group = transposed, group
        return _linear(x, weight, bias, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[:3]
        if wants_x:
            to_x = gradient @ _in_by_out(weight, ctx.transposed).t()
            summed = start_reduce(to_x, ctx.group)
        own = _weight_gradients(x, gradient, ctx.transposed, *wants)
        return summed() if wants_x else None, *own, None, None


class _SequenceColumn(Function):
    """`linear(gather_from_sequence(x))`, overlapped likewise. It keeps this rank's part of x, and
    gathers the rest once more for the weight's gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, transposed, group):
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.group = transposed, group
        return _linear(start_gather(x, group, -2)(), weight, bias, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[:3]
        gathered = start_gather(x, ctx.group, -2)
        if wants_x:
            to_x = gradient @ _in_by_out(weight, ctx.transposed).t()
            summed = start_reduce_scatter(to_x, ctx.group, -2)
        own = _weight_gradients(gathered(), gradient, ctx.transposed, *wants)
        return summed() if wants_x else None, *own, None, None


def _linear(x, weight, bias, transposed):
    return F.linear(x, weight.t() if transposed else weight, bias)


def _in_by_out(weight, transposed):
    return weight if transposed else weight.t()


def _weight_gradients(x, gradient, transposed, wants_weight, wants_bias):
    """Of the weight, in the form that it has, and of the bias; None where there is none."""
    x, gradient = (one.unsqueeze(0).flatten(0, -2) for one in (x, gradient))  # also of one row
    to_weight = None
    if wants_weight:
        to_weight = x.t() @ gradient if transposed else gradient.t() @ x
    return to_weight, gradient.sum(0) if wants_bias else None


def _as_autocast(x, *weights):
    """The tensors in the precision of autocast, which knows nothing of what a Function does."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *weights
    dtype, as_they_are = torch.get_autocast_dtype(kind), (None, torch.float64)
    return tuple(
        one if getattr(one, "dtype", None) in as_they_are else one.to(dtype)
        for one in (x, *weights)
    )
