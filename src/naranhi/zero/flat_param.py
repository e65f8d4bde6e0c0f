"""Some parameters of a model as one flat parameter, of which each rank keeps a shard.

    | weight ............. | bias .. | weight ............. | bias .. | 0 |    whole, with padding
    | shard of rank 0            | shard of rank 1                        |

Sharding the flat parameter instead of each parameter makes all shards equally long, and moves the
whole in one message for each pair of ranks. The price: an optimizer sees a shard without the
parameters' shapes, so it has to treat each element by itself ("element-wise").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from naranhi.autograd.graph import edge_of_leaf
from naranhi.collectives import chunks, ring
from naranhi.zero.absent_gradient import sharded_gradient, unset_gradient

ALIGN = 8  # elements: parameters begin where a processor loads 16 bytes (in bf16) at once


class FlatParam:
    """A flat parameter in four forms: whole and shard, parameters and gradients.

    Args:
        named: [(name, parameter)], of one dtype, either all trained or all frozen; those of a
            parameter group are adjacent, in the order of the groups.
        group_of: The number of each parameter's group.
        stage: The stage of ZeRO. Below 3 the parameters stay whole; at 1 the gradients do, too.
        dtype: The dtype of the computation; if it is not the parameters', `master` keeps theirs.
        axes: The groups over whose ranks the parameters are the same: they are sharded over the
            first, and gradients are summed over all. Empty for this rank alone.
        tag: The message tag of this flat parameter alone, above 0.

    Attributes:
        whole: The flat parameter, padded. Each parameter is a view of it. Freeing it resizes its
            storage to 0, because a view that autograd keeps would otherwise keep the memory.
        gradients: The flat gradients, into which each parameter's gradient is moved; freed in the
            same way.
        shard: This rank's slice of `whole`, in `dtype`.
        master: The same slice in the parameters' own dtype.
        pieces: {group's number: its part of the master, as a parameter for an optimizer}, empty if
            the group lies in other ranks' shards.
        spans: {group's number: where its part lies in the shard}.
        starts: {group's number: where the group begins in the flat parameter}.
        gradient: This rank's shard of the sum over the ranks; None until it is reduced.
    """

    axes: Sequence[dist.ProcessGroup]
    group: dist.ProcessGroup | None
    stage: int
    group_of: Mapping[nn.Parameter, int]
    tag: int
    rank: int
    ranks: int
    shapes: list[torch.Size]
    places: list[slice]
    length: int
    size: int
    shard_slice: slice
    shard: torch.Tensor
    master: torch.Tensor
    starts: dict[int, int]
    spans: dict[int, slice]
    pieces: dict[int, nn.Parameter]
    gradient: torch.Tensor | None
    seen: set[nn.Parameter]

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group_of: Mapping[nn.Parameter, int],
        stage: int,
        dtype: torch.dtype,
        axes: Sequence[dist.ProcessGroup],
        tag: int,
    ) -> None:
        self.axes, self.stage, self.group_of, self.tag = axes, stage, group_of, tag
        self.group = axes[0] if axes else None
        self.rank = dist.get_rank(self.group) if axes else 0
        self.ranks = dist.get_world_size(self.group) if axes else 1
        self.names: list[str] = [name for name, _ in named]
        self.parameters: list[nn.Parameter] = [param for _, param in named]
        self.name_of: dict[nn.Parameter, str] = {param: name for name, param in named}
        self.trained: bool = self.parameters[0].requires_grad
        self.shapes, self.places, end = [param.shape for param in self.parameters], [], 0
        for param in self.parameters:
            self.places.append(slice(end, end + param.numel()))
            end += -(-param.numel() // ALIGN) * ALIGN
        self.length, self.size = end, shard_size(end, self.ranks)
        own = self.shard_slice = slice(self.rank * self.size, (self.rank + 1) * self.size)

        values = self.parameters[0].detach().new_zeros(self.size * self.ranks)
        for param, place in zip(self.parameters, self.places, strict=True):
            values[place].copy_(param.detach().reshape(-1))
        self.whole: torch.Tensor = values.to(dtype)
        self.shard = self.whole[own] if stage < 3 else self.whole[own].clone()
        self.master = self.shard if dtype == values.dtype else values[own].clone()
        self.starts, self.spans, self.pieces = {}, {}, {}
        if self.trained:
            pairs = zip(map(group_of.get, self.parameters), self.places, strict=True)
            for number, adjacent in groupby(pairs, lambda pair: pair[0]):
                places = [place for _, place in adjacent]
                self.starts[number], stop = places[0].start, places[-1].stop
                self.spans[number] = slice(
                    *(min(max(edge - own.start, 0), self.size) for edge in (places[0].start, stop))
                )
                self.pieces[number] = nn.Parameter(self.master[self.spans[number]])

        self._unset = list(map(unset_gradient, self.pieces.values()))
        self._nothing = self.whole.new_empty(0)
        self._views = self.cut(self.whole)
        self._rows = self.whole.view(self.ranks, -1).unbind()
        self.use_sharded()

        self.gradient = None
        self.seen = set()  # parameters that got a gradient in this step, on this rank
        self._stand_ins = {}  # by parameter, for `.grad` once the gradients are reduced
        if self.trained:
            self.gradients: torch.Tensor = torch.zeros_like(self.whole)
            self._gradient_of = dict(zip(self.parameters, self.cut(self.gradients), strict=True))
            self._gradient_rows = self.gradients.view(self.ranks, -1).unbind()
            ends = [*(place.start for place in self.places[1:]), len(self.gradients)]
            self._gaps = [
                self.gradients[place.stop : end]
                for place, end in zip(self.places, ends, strict=True)
                if place.stop < end
            ]
            _free(self.gradients)

    def cut(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat tensor, one for each parameter and of its shape."""
        return [
            row[place].view(shape) for place, shape in zip(self.places, self.shapes, strict=True)
        ]

    # --- parameters ------------------------------------------------------------------------------

    def all_gather(self) -> Iterator[None]:
        """Return a kernel (see `collectives`) that all-gathers `whole`, which is valid at its end.

        Each rank sends its shard to every other: as many bytes as on a ring (though more between
        nodes), and nothing to forward while a unit computes. Messages carry this flat parameter's
        own tag, if the backend has tags, so different all-gathers hang and never mix.
        """
        if self.stage == 3:
            _allocate(self.whole)
            self._rows[self.rank].copy_(self.shard)
        others = [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]
        works = chunks.start(
            self.group,
            sends=[(self._rows[self.rank], other) for other in others],
            receives=[(self._rows[other], other) for other in reversed(others)],
            tag=self.tag,
        )
        yield
        chunks.finish(works)

    def use_unsharded(self, row: torch.Tensor | None = None) -> None:
        """Make the parameters views of a flat tensor.

        Args:
            row: The flat tensor; by default `whole`, which has been gathered.
        """
        views = self._views if row is None else self.cut(row)
        for param, view in zip(self.parameters, views, strict=True):
            param.data = view

    def in_other_memory(self) -> Iterator[str]:
        """Yield the names of parameters that are neither views of `whole` nor freed."""
        for name, param, view in zip(self.names, self.parameters, self._views, strict=True):
            if param.dtype != view.dtype or param.data_ptr() not in (view.data_ptr(), 0):
                yield name

    def use_sharded(self) -> None:
        """Put the parameters into their state between two steps: at stage 3, empty."""
        with torch.inference_mode(False):  # in it parameters would get no autograd nodes
            self.use_unsharded()
            # Autograd's nodes remember a parameter's shape and dtype: make and keep them now.
            self._nodes = [edge_of_leaf(param) for param in self.parameters if self.trained]
        if self.stage == 3:
            self.reshard()

    def reshard(self) -> None:
        """Free `whole`. Parameters become empty: a layer fails with a shape error, a sum is 0."""
        for param in self.parameters:
            param.data = self._nothing
        _free(self.whole)

    # --- gradients -------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Move the parameters' gradients into the flat gradients. A missing one counts as zeros."""
        _allocate(self.gradients)
        for gap in self._gaps:
            gap.zero_()
        for param, view in self._gradient_of.items():
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)
                param.grad = None
                self.seen.add(param)

    def reduce_scatter(self) -> list[Iterator[None]]:
        """Return kernels that reduce-scatter the flat gradients; then call `keep_reduced`.

        Sums replace the gradients in place, which takes the least memory.
        """
        return [
            ring.reduce_scatter(
                [row[piece] for row in self._gradient_rows], None, self.group, self.rank, self.ranks
            )
            for piece in chunks.cut(self._gradient_rows[self.rank])
        ]

    def keep_reduced(self) -> None:
        """Keep the reduced shard, or add it in the master's dtype; free the rest (stages 2, 3)."""
        total = self._gradient_rows[self.rank]
        if self.gradient is not None:
            self.gradient = self.gradient.to(self.master.dtype).add_(total)
        else:
            self.gradient = total.clone() if self.stage > 1 else total
        if self.stage > 1:
            _free(self.gradients)

    def gradient_parts(self) -> Iterator[torch.Tensor]:
        """Yield a view of this rank's part of each parameter's gradient, in order; may be empty."""
        for place in self.places:
            start, stop = (
                max(edge - self.shard_slice.start, 0) for edge in (place.start, place.stop)
            )
            yield self.gradient[start:stop]

    def not_finite(self) -> Iterator[str]:
        """Yield the names of parameters with an infinite or NaN gradient in this rank's shard."""
        if not self.gradient.isfinite().all():
            for name, part in zip(self.names, self.gradient_parts(), strict=True):
                if not part.isfinite().all():
                    yield name

    # --- the optimizer's step --------------------------------------------------------------------

    def set_shard_grads(self) -> None:
        """Set `.grad` of each of the `pieces`, in the master's dtype.

        It is None if no parameter of the group has a gradient in this step. (A parameter without a
        gradient beside others that have one gets zeros.)
        """
        with_gradient = {self.group_of[param] for param in self.seen}
        for number, piece in self.pieces.items():
            grad = self.gradient[self.spans[number]]
            piece.grad = grad.to(piece.dtype) if number in with_gradient else None

    def hide_gradients(self) -> None:
        """Make every use of `.grad` raise: the sums are in `gradient`, a shard on each rank."""
        for param in self.seen:
            stand_in = self._stand_ins.get(param)
            if stand_in is None or stand_in.shape != param.shape:
                stand_in = sharded_gradient(param, self.name_of[param])
                self._stand_ins[param] = stand_in
            param.grad = stand_in

    def hide_shards(self) -> None:
        """Make every use of the pieces' `.grad` raise, until `set_shard_grads`."""
        for piece, stand_in in zip(self.pieces.values(), self._unset, strict=True):
            piece.grad = stand_in

    def zero_grad(self) -> None:
        """Discard all gradients after a step."""
        for param in [*self.pieces.values(), *self.parameters]:
            param.grad = None
        self.gradient = None
        self.seen.clear()
        if self.trained:
            _free(self.gradients)

    def refresh(self) -> None:
        """Copy the master, which the optimizer has changed, into the shard."""
        if self.shard is not self.master:
            self.shard.copy_(self.master)
        torch.autograd.graph.increment_version(self.parameters)  # so old graphs raise


def shard_size(length: int, ranks: int) -> int:
    """Return the number of elements of each shard, with the padding that fills the last ones."""
    return -(-length // (ALIGN * ranks)) * ALIGN


def _free(tensor):
    tensor.untyped_storage().resize_(0)


def _allocate(tensor):
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
