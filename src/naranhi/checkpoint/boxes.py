"""A rank's elements of a tensor as boxes, the form in which a checkpoint is written.

A box is an offset and sizes: the elements from `offset` to `offset + sizes` along each dimension.
Every way to shard a tensor gives boxes:

    a whole parameter                       one box
    a shard of tensor parallelism           a box for each of its `Split.parts`, without padding
    a run of elements, as ZeRO shards them  the rest of a row, whole rows, the start of a row: for a
                                            tensor of n dimensions at most 2n - 1 boxes
    a run of a shard, ZeRO over tensors     the boxes of the run, each cut by the parts

Two meshes that cut a tensor differently have different boxes of the same tensor, and the overlap of
two boxes is a box. So what one mesh has saved can be loaded on any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from naranhi.tensor_parallel.shards import Split


class Box(NamedTuple):
    """A box of a tensor.

    Args:
        offset: the index of its first element, along each dimension.
        sizes: its sizes, in elements.
    """

    offset: tuple[int, ...]
    sizes: tuple[int, ...]


class Boxes(NamedTuple):
    """The boxes of a tensor that are on this rank.

    Args:
        shape: the shape of the whole tensor.
        dtype: its dtype.
        views: {box: its values}, which are views of this rank's memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    views: dict[Box, torch.Tensor]

    def at(self, offset: Sequence[int]) -> torch.Tensor:
        """Return the values of the box that begins at an offset."""
        return next(view for box, view in self.views.items() if box.offset == tuple(offset))


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up the elements `start` to `stop` of a row-major tensor, in order.

    Args:
        shape: the shape of the tensor.
        start: the first element, counted in the flattened tensor.
        stop: the element after the last.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row, inner = prod(shape[1:]), tuple(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # the run lies within one row
        pieces = [(last, start - last * row, stop - last * row)]
    else:
        pieces = [(first - 1, start - (first - 1) * row, row)] if start < first * row else []
        pieces += [None] if first < last else []
        pieces += [(last, 0, stop - last * row)] if last * row < stop else []
    for piece in pieces:
        if piece is None:
            yield Box((first, *(0 for _ in inner)), (last - first, *inner))
        else:
            index, inner_start, inner_stop = piece
            for box in boxes_of_run(inner, inner_start, inner_stop):
                yield Box((index, *box.offset), (1, *box.sizes))


def boxes_of_shard(
    box: Box, view: torch.Tensor, split: Split, rank: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield a box of a rank's shard as boxes of the whole tensor, without padding, and their views.

    Args:
        box: a box of the shard.
        view: its values.
        split: how the whole tensor is sharded.
        rank: whose shard it is.
    """
    dim, length = split.dim, split.size // split.parts  # of each part of the whole
    each = -(-split.size // (split.parts * split.ranks))  # of each part of the shard
    begin, end = box.offset[dim], box.offset[dim] + box.sizes[dim]
    for part in range(split.parts):
        start = max(begin, part * each)
        stop = min(end, part * each + min(each, length - rank * each))
        if start < stop:
            offset, sizes = list(box.offset), list(box.sizes)
            offset[dim] = part * length + rank * each + start - part * each
            sizes[dim] = stop - start
            yield Box(tuple(offset), tuple(sizes)), view.narrow(dim, start - begin, stop - start)


def views_of_run(
    memory: torch.Tensor,
    local_shape: Sequence[int],
    start: int,
    split: Split | None = None,
    rank: int = 0,
) -> dict[Box, torch.Tensor]:
    """Return {box of the whole tensor: a view of `memory`}.

    Args:
        memory: 1-D, a run of elements of the flattened shard.
        local_shape: the shape of the shard; without `split`, that of the whole tensor.
        start: where in the flattened shard the run begins.
        split: how the whole tensor is sharded; None if it is not.
        rank: whose shard it is.
    """
    views, done = {}, 0
    for box in boxes_of_run(local_shape, start, start + len(memory)):
        view = memory[done : done + prod(box.sizes)].view(box.sizes)
        done += prod(box.sizes)
        views.update(boxes_of_shard(box, view, split, rank) if split else [(box, view)])
    return views


def tiling_fault(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Return what is wrong with boxes that should cover a tensor exactly once; None if they do.

    Args:
        shape: the shape of the tensor.
        boxes: the boxes, in any order.
    """
    ordered = sorted(set(boxes))
    for box in ordered:
        inside = all(
            start >= 0 and start + size <= length
            for start, size, length in zip(box.offset, box.sizes, shape, strict=True)
        )
        if not inside:
            return f"{_text(box)} does not lie in the tensor"
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:  # sorted by offset, so boxes past this one end the search
            if box.offset and other.offset[0] >= box.offset[0] + box.sizes[0]:
                break
            if _overlap(box, other):
                return f"{_text(box)} and {_text(other)} overlap"
    covered, elements = sum(prod(box.sizes) for box in ordered), prod(shape)
    if covered != elements:
        return f"{elements - covered} of {elements} elements are on no rank"
    return None


def writers(
    owners: Mapping[str, Mapping[Box, Sequence[int]]], itemsize: Mapping[str, int]
) -> dict[tuple[str, Box], int]:
    """Return {(tensor, box): the rank that writes it}: the least busy replica so far.

    Every rank computes the same result, so none is sent. The first replica writes all buffers: each
    replica may have its own statistics, and a mean must not be saved with another's variance.

    Args:
        owners: {tensor: {box: the ranks that have it}}.
        itemsize: {tensor: bytes of an element}.
    """
    busy, chosen = {}, {}
    for name in sorted(owners):
        for box, ranks in sorted(owners[name].items()):
            if name.startswith("buffers."):
                rank = min(ranks)
            else:
                rank = min(ranks, key=lambda rank: (busy.get(rank, 0), rank))
            busy[rank] = busy.get(rank, 0) + prod(box.sizes) * itemsize[name]
            chosen[name, box] = rank
    return chosen


def _overlap(box, other):
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(*box, *other, strict=True)
    )


def _text(box):
    return f"the box at {list(box.offset)} of {list(box.sizes)}"
