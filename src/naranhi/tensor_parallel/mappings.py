"""Entering and leaving the region of a model that tensor parallelism splits over a group of ranks.

Outside the region every rank of the group has the same activations, inside each has a part of them.
A backward goes through the region the other way round, so each way in is paired with a way out: the
backward of one is the forward of the other.

    copy_to_group           nothing              <->  reduce_from_group           all-reduce
    scatter_to_group        own part             <->  gather_from_group           all-gather
    gather_from_sequence    all-gather           <->  reduce_scatter_to_sequence  reduce-scatter

The first pair is Megatron's f and g. `gather_from_group` is for what every rank then uses alike, so
that each has the whole gradient already and keeps its part; after `gather_from_sequence` each rank
does something else with the whole, so that gradients are parts of a sum.

`group` is the process group, None for the default one. Tensors that have a shape and nothing in
them (`pipeline.shape_inference`, torch's meta device) take the same way, and nothing is sent.

Sources: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model
parallelism" (2019), section 3; Korthikanti et al., "Reducing activation recomputation in large
Transformer models" (2022), section 4.2.2, for the third pair.
"""

import os
from time import perf_counter

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from naranhi import collectives

LOOK = 1e-3  # seconds that a wait looks before it sleeps


def copy_to_group(x, group=None):
    """x as it is; the backward sums its gradients over the group."""
    return CopyFunction.apply(x, group)


class CopyFunction(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        return reduce_from_group(gradient, ctx.group), None


def reduce_from_group(x, group=None):
    """The sum of the ranks' x, on every rank; the backward hands on the gradient as it is."""
    return ReduceFunction.apply(x, group)


class ReduceFunction(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return start_reduce(x.clone(memory_format=torch.contiguous_format), group)()

    @staticmethod
    def backward(ctx, gradient):
        return copy_to_group(gradient, ctx.group), None


def scatter_to_group(x, group=None, dim=-1):
    """This rank's part of x along `dim`; the backward gathers. ValueError for parts of two sizes"""
    return _Scatter.apply(x, group, dim)


class _Scatter(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return parts(x, group, dim)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return gather_from_group(gradient, ctx.group, ctx.dim), None, None


def gather_from_group(x, group=None, dim=-1):
    """The ranks' x, one after the other along `dim`; the backward keeps this rank's part."""
    return _Gather.apply(x, group, dim)


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return start_gather(x, group, dim)()

    @staticmethod
    def backward(ctx, gradient):
        return scatter_to_group(gradient, ctx.group, ctx.dim), None, None


def gather_from_sequence(x, group=None, dim=-2):
    """The ranks' x, one after the other along `dim`; the backward sums, and keeps this rank's part.

    The default `dim` is the sequence in (batch, sequence, hidden).
    """
    return _GatherSequence.apply(x, group, dim)


class _GatherSequence(_Gather):
    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter_to_sequence(gradient, ctx.group, ctx.dim), None, None


def reduce_scatter_to_sequence(x, group=None, dim=-2):
    """This rank's part along `dim` of the sum of the ranks' x; the backward gathers.

    ValueError for parts of two sizes, before anything is sent.
    """
    return _ReduceScatterSequence.apply(x, group, dim)


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return start_reduce_scatter(x, group, dim)()

    @staticmethod
    def backward(ctx, gradient):
        return gather_from_sequence(gradient, ctx.group, ctx.dim), None, None


def start_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum of the ranks' x, or another `op`, in place."""
    if stays(x, group):
        return lambda: x
    return _ending(dist.all_reduce(x, op, group, async_op=True), x, lambda: x)


def start_gather(x, group, dim):
    """The ranks' x, one after the other along `dim`."""
    ranks = dist.get_world_size(group)
    if stays(x, group):
        return lambda: torch.cat([x] * ranks, dim)
    x = x.contiguous()
    pieces = [torch.empty_like(x) for _ in range(ranks)]
    work = dist.all_gather(pieces, x, group, async_op=True)
    return _ending(work, x, lambda: torch.cat(pieces, dim))


def start_reduce_scatter(x, group, dim):
    """This rank's part, along `dim`, of the sum of the ranks' x."""
    pieces = parts(x, group, dim)
    if stays(x, group):
        return lambda: pieces[0].contiguous()
    output = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
    if dist.get_backend(group) == "gloo":
        collectives.reduce_scatter(output, torch.stack(pieces), group)
        return lambda: output
    pieces = [piece.contiguous() for piece in pieces]
    work = dist.reduce_scatter(output, pieces, group=group, async_op=True)
    return _ending(work, x, lambda: output)


def parts(x, group, dim):
    """x cut along `dim` into a view for each rank. ValueError unless they are of one size."""
    ranks = dist.get_world_size(group)
    if x.shape[dim] % ranks:
        raise ValueError(f"{ranks} ranks do not divide dimension {dim} of {tuple(x.shape)}")
    return x.chunk(ranks, dim)


def stays(x, group):
    """Whether there is nothing to send: one rank, or a tensor that has only a shape."""
    return isinstance(x, FakeTensor) or x.is_meta or dist.get_world_size(group) == 1


def _ending(work, x, result):
    def wait():
        if x.device.type == "cpu":
            _look_for_the_end(work)
        work.wait()
        return result()

    return wait


def _look_for_the_end(work):
    """To be woken takes a sleeping thread about as long as a short message takes. So do not sleep
    at once, but leave the core to whoever needs it (gloo's own threads do). Measured on two ranks:
    a tenth to a sixth of a step of narrow layers; with more ranks than cores, nothing either way.
    """
    end = perf_counter() + LOOK
    while not work.is_completed() and perf_counter() < end:
        os.sched_yield()
