"""Functions that enter and leave the region of a model that tensor parallelism splits over ranks.

Outside the region every rank of the group has the same activations; inside, each has a part of
them. A backward passes through the region in reverse, so each function that enters is paired with
one that leaves: the backward of one is the forward of the other.

    copy_to_group           nothing              <->  reduce_from_group           all-reduce
    scatter_to_group        own part             <->  gather_from_group           all-gather
    gather_from_sequence    all-gather           <->  reduce_scatter_to_sequence  reduce-scatter

The first pair is Megatron's f and g. Use `gather_from_group` if every rank then computes the same
from the result: each rank then has the whole gradient already, and keeps its part. After
`gather_from_sequence` each rank computes something different from the result, so the ranks'
gradients are partial sums.

`group` is the process group, None for the default one. Tensors with a shape but no values
(`pipeline.shape_inference`, torch's meta device) pass through the same functions, and nothing is
sent.

Sources: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model
parallelism" (2019), section 3; Korthikanti et al., "Reducing activation recomputation in large
Transformer models" (2022), section 4.2.2, for the third pair.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from naranhi import collectives
from naranhi.distributed import backend_for

LOOK = 1e-3  # seconds that a wait polls before it blocks


def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return x unchanged; the backward sums its gradients over the group."""
    return CopyFunction.apply(x, group)


class CopyFunction(Function):
    """The identity in the forward, an all-reduce in the backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return x unchanged."""
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the sum of the ranks' gradients."""
        return reduce_from_group(gradient, ctx.group), None


def reduce_from_group(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum of the ranks' x, on every rank; the backward passes the gradient unchanged."""
    return ReduceFunction.apply(x, group)


class ReduceFunction(Function):
    """An all-reduce in the forward, the identity in the backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return the sum of the ranks' x."""
        ctx.group = group
        return start_reduce(x.clone(memory_format=torch.contiguous_format), group)()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient unchanged."""
        return copy_to_group(gradient, ctx.group), None


def scatter_to_group(
    x: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = -1
) -> torch.Tensor:
    """Return this rank's part of x along `dim`; the backward all-gathers.

    Raises:
        ValueError: the ranks do not divide x along `dim` into parts of equal size.
    """
    return _Scatter.apply(x, group, dim)


class _Scatter(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return parts(x, group, dim)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return gather_from_group(gradient, ctx.group, ctx.dim), None, None


def gather_from_group(
    x: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = -1
) -> torch.Tensor:
    """Concatenate the ranks' x along `dim`; the backward keeps this rank's part."""
    return _Gather.apply(x, group, dim)


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return start_gather(x, group, dim)()

    @staticmethod
    def backward(ctx, gradient):
        return scatter_to_group(gradient, ctx.group, ctx.dim), None, None


def gather_from_sequence(
    x: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = -2
) -> torch.Tensor:
    """Concatenate the ranks' x along `dim`; the backward sums, and keeps this rank's part.

    The default `dim` is the sequence in (batch, sequence, hidden).
    """
    return _GatherSequence.apply(x, group, dim)


class _GatherSequence(_Gather):
    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter_to_sequence(gradient, ctx.group, ctx.dim), None, None


def reduce_scatter_to_sequence(
    x: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = -2
) -> torch.Tensor:
    """Return this rank's part, along `dim`, of the sum of the ranks' x; the backward all-gathers.

    Raises:
        ValueError: the ranks do not divide x along `dim` into parts of equal size; raised before
            anything is sent.
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


def start_reduce(
    x: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Callable[[], torch.Tensor]:
    """Start to sum the ranks' x, or to reduce them by another `op`, in place.

    Returns:
        A function that waits for the all-reduce and returns x.
    """
    if stays(x, group):
        return lambda: x
    return _ending(dist.all_reduce(x, op, group, async_op=True), x, lambda: x)


def start_gather(
    x: torch.Tensor, group: dist.ProcessGroup | None, dim: int
) -> Callable[[], torch.Tensor]:
    """Start to concatenate the ranks' x along `dim`.

    Returns:
        A function that waits for the all-gather and returns the result.
    """
    ranks = dist.get_world_size(group)
    if stays(x, group):
        return lambda: torch.cat([x] * ranks, dim)
    x = x.contiguous()
    pieces = [torch.empty_like(x) for _ in range(ranks)]
    work = dist.all_gather(pieces, x, group, async_op=True)
    return _ending(work, x, lambda: torch.cat(pieces, dim))


def start_reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup | None, dim: int
) -> Callable[[], torch.Tensor]:
    """Start to compute this rank's part, along `dim`, of the sum of the ranks' x.

    Returns:
        A function that waits for the reduce-scatter and returns the part. On gloo the
        reduce-scatter has finished when `start_reduce_scatter` returns.

    Raises:
        ValueError: the ranks do not divide x along `dim` into parts of equal size.
    """
    pieces = parts(x, group, dim)
    if stays(x, group):
        return lambda: pieces[0].contiguous()
    output = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
    if backend_for(x.device, group) == "gloo":
        collectives.reduce_scatter(output, torch.stack(pieces), group)
        return lambda: output
    pieces = [piece.contiguous() for piece in pieces]
    work = dist.reduce_scatter(output, pieces, group=group, async_op=True)
    return _ending(work, x, lambda: output)


def parts(x: torch.Tensor, group: dist.ProcessGroup | None, dim: int) -> tuple[torch.Tensor, ...]:
    """Split x along `dim` into one view for each rank.

    Raises:
        ValueError: the ranks do not divide x along `dim`.
    """
    ranks = dist.get_world_size(group)
    if x.shape[dim] % ranks:
        raise ValueError(f"{ranks} ranks do not divide dimension {dim} of {tuple(x.shape)}")
    return x.chunk(ranks, dim)


def stays(x: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return whether nothing has to be sent: one rank, or a tensor that has only a shape."""
    return isinstance(x, FakeTensor) or x.is_meta or dist.get_world_size(group) == 1


def _ending(work, x, result):
    def wait():
        if x.device.type == "cpu":
            _look_for_the_end(work)
        work.wait()
        return result()

    return wait


def _look_for_the_end(work):
    """Poll for the end of a collective for up to `LOOK` seconds before blocking.

    Waking a thread takes about as long as a short message. So do not block at once, but yield the
    core to any thread that needs it (gloo's own threads do). Measured on two ranks: this saves a
    tenth to a sixth of a step of narrow layers; with more ranks than cores it neither saves nor
    costs time.
    """
    end = perf_counter() + LOOK
    while not work.is_completed() and perf_counter() < end:
        os.sched_yield()
