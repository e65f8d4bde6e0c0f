"""Some parameters of a model as one row of numbers, of which each rank keeps a piece.

    | weight ............. | bias .. | weight ............. | bias .. | 0 |    the row, and padding
    | shard of rank 0            | shard of rank 1                        |

Cutting the row and not the parameters makes all shards equally long, and moves a whole row in one
message for each pair of ranks. The price: an optimizer sees a shard without its shapes, so that it
has to treat each number by itself ("element-wise").
"""

from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from naranhi.collectives import chunks, ring
from naranhi.zero.absent_gradient import Elsewhere

ALIGN = 8  # numbers: parameters begin where a processor loads 16 bytes (in bf16) at once


class FlatParam:
    """The row of some parameters, in four forms: whole and shard, parameters and gradients.

    named: [(name, parameter)], of one dtype, all trained or none; those of a parameter group side
        by side, in the order of the groups.
    group_of: the number of each parameter's group.
    stage: of ZeRO. Below 3 the parameters stay whole; at 1 the gradients do.
    tag: a number of its own, above 0.
    dtype: what is computed with; where it is not that of the parameters, `master` keeps theirs.

    whole, gradients: the rows. A parameter is a view of the first; its gradient is moved into the
        second. What is freed is the memory under them: a view that autograd keeps would keep it.
    shard, master: this rank's piece, in `dtype` and in the parameters' own.
    pieces: {group's number: its part of the master, as a parameter for an optimizer}; empty where
        the group lies in other ranks' shards. spans: where these lie in the shard; starts: where
        their groups begin in the row.
    gradient: this rank's piece of the sum over the ranks; None until there is one.
    """

    def __init__(self, named, group_of, stage, dtype, group, tag):
        self.group, self.stage, self.group_of, self.tag = group, stage, group_of, tag
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.names = [name for name, _ in named]
        self.parameters = [one for _, one in named]
        self.name_of = {param: name for name, param in named}
        self.trained = self.parameters[0].requires_grad
        self.shapes, self.places, end = [one.shape for one in self.parameters], [], 0
        for one in self.parameters:
            self.places.append(slice(end, end + one.numel()))
            end += -(-one.numel() // ALIGN) * ALIGN
        self.length, self.size = end, shard_size(end, self.ranks)
        self.mine = slice(self.rank * self.size, (self.rank + 1) * self.size)

        values = self.parameters[0].detach().new_zeros(self.size * self.ranks)
        for one, place in zip(self.parameters, self.places, strict=True):
            values[place].copy_(one.detach().reshape(-1))
        self.whole = values.to(dtype)
        self.shard = self.whole[self.mine] if stage < 3 else self.whole[self.mine].clone()
        self.master = self.shard if dtype == values.dtype else values[self.mine].clone()
        self.starts, self.spans, self.pieces = {}, {}, {}
        if self.trained:
            for number, places in groupby(
                zip(map(group_of.get, self.parameters), self.places, strict=True),
                lambda one: one[0],
            ):
                places = [place for _, place in places]
                self.starts[number], stop = places[0].start, places[-1].stop
                self.spans[number] = slice(
                    *(
                        min(max(one - self.mine.start, 0), self.size)
                        for one in (places[0].start, stop)
                    )
                )
                self.pieces[number] = nn.Parameter(self.master[self.spans[number]])

        self._nothing = self.whole.new_empty(0)
        self._views = self.cut(self.whole)
        self._rows = self.whole.view(self.ranks, -1).unbind()
        self.hide()

        self.gradient = None
        self.seen = set()  # parameters that got a gradient in this step, on this rank
        self._stand_ins = {}  # by parameter, for `.grad` when the gradients are summed
        if self.trained:
            self.gradients = torch.zeros_like(self.whole)
            self._gradient_of = dict(zip(self.parameters, self.cut(self.gradients), strict=True))
            self._gradient_rows = self.gradients.view(self.ranks, -1).unbind()
            ends = [*(place.start for place in self.places[1:]), len(self.gradients)]
            self._gaps = [
                self.gradients[place.stop : end]
                for place, end in zip(self.places, ends, strict=True)
                if place.stop < end
            ]
            _free(self.gradients)

    def numbers(self, start, stop):
        """How many numbers of a part of the row are not padding."""
        return sum(max(0, min(place.stop, stop) - max(place.start, start)) for place in self.places)

    def cut(self, row):
        """Views of a row, one for each parameter and of its shape."""
        return [
            row[place].view(shape) for place, shape in zip(self.places, self.shapes, strict=True)
        ]

    # --- parameters ------------------------------------------------------------------------------

    def gathering(self):
        """A kernel (see `collectives`) that fills the row from all ranks' shards: it may be used
        when that has ended.

        Each rank sends its shard to every other. That is as much as on a ring, and nothing has to
        be sent on while a unit computes. Messages have the row's own tag, where the backend knows
        tags: ranks that gather different rows wait in vain, and take none for another.
        """
        if self.stage == 3:
            _allocate(self.whole)
            self._rows[self.rank].copy_(self.shard)
        others = [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]
        # Sends before receives: on gloo a step of many small units is a tenth shorter so.
        messages = [(dist.isend, self._rows[self.rank], other) for other in others]
        messages += [(dist.irecv, self._rows[other], other) for other in reversed(others)]
        works = (
            dist.batch_isend_irecv(
                [
                    dist.P2POp(operation, row, group=self.group, group_peer=other, tag=self.tag)
                    for operation, row, other in messages
                ]
            )
            if messages
            else []
        )
        yield
        chunks.finish(works)

    def show(self, row=None):
        """Let the parameters be views of a row; by default of `whole`, which has been gathered."""
        views = self._views if row is None else self.cut(row)
        for one, view in zip(self.parameters, views, strict=True):
            one.data = view

    def hide(self):
        """Let the parameters be what they are between two steps: at stage 3, nothing."""
        self.show()
        # Autograd's nodes for the parameters remember a shape and a dtype: made now, they last.
        self._nodes = [
            torch.autograd.graph.get_gradient_edge(one) for one in self.parameters if self.trained
        ]
        if self.stage == 3:
            self.free()

    def free(self):
        """Give the row's memory back. Parameters become empty, so any use fails with an error about
        their shape."""
        for one in self.parameters:
            one.data = self._nothing
        _free(self.whole)

    # --- gradients -------------------------------------------------------------------------------

    def take(self):
        """Move the parameters' gradients into the row. A missing one counts as zeros."""
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

    def reducing(self):
        """Kernels that add the ranks' rows up, each rank its own piece; then call `reduced`.

        Sums replace what has been sent on already, which takes the least memory.
        """
        return [
            ring.reduce_scatter(
                [row[piece] for row in self._gradient_rows], None, self.group, self.rank, self.ranks
            )
            for piece in chunks.cut(self._gradient_rows[self.rank])
        ]

    def reduced(self):
        """The sum is there: keep it, and free the row (at stage 1 it is a part of that)."""
        total = self._gradient_rows[self.rank]
        if self.gradient is not None:
            self.gradient += total
        else:
            self.gradient = total.clone() if self.stage > 1 else total
        if self.stage > 1:
            _free(self.gradients)

    def gradient_parts(self):
        """This rank's part of each parameter's gradient, in order, as a view; it may be empty."""
        for place in self.places:
            start, stop = (max(one - self.mine.start, 0) for one in (place.start, place.stop))
            yield self.gradient[start:stop]

    def not_finite(self):
        """The names of parameters in this rank's piece whose gradient is infinite or no number."""
        if not self.gradient.isfinite().all():
            for name, part in zip(self.names, self.gradient_parts(), strict=True):
                if not part.isfinite().all():
                    yield name

    # --- the optimizer's step --------------------------------------------------------------------

    def give_gradients(self):
        """To the pieces, in the master's dtype; None to one of whose group nothing has a gradient
        in this step. (A parameter without one beside others that have one gets zeros.)"""
        with_gradient = {self.group_of[one] for one in self.seen}
        for number, piece in self.pieces.items():
            piece.grad = (
                self.gradient[self.spans[number]].to(piece.dtype)
                if number in with_gradient
                else None
            )

    def hide_gradients(self):
        """Let every use of `.grad` fail: the sums are in `gradient`, a shard on each rank."""
        for param in self.seen:
            stand_in = self._stand_ins.get(param)
            if stand_in is None or stand_in.shape != param.shape:
                stand_in = self._stand_ins[param] = Elsewhere(
                    param,
                    (
                        f"the gradient of parameter {self.name_of[param]} is summed and sharded "
                        "over the ranks: use clip_grad_norm_() or shard_gradients() of Zero for "
                        "it, and step() or zero_grad() before another backward"
                    ),
                )
            param.grad = stand_in

    def forget_gradients(self):
        """After a step: none anywhere."""
        for one in [*self.pieces.values(), *self.parameters]:
            one.grad = None
        self.gradient = None
        self.seen.clear()
        if self.trained:
            _free(self.gradients)

    def refresh(self):
        """Let the shard follow the master, which the optimizer has changed."""
        if self.shard is not self.master:
            self.shard.copy_(self.master)


def shard_size(length, ranks):
    """The numbers of a shard, the last rank's with the padding."""
    return -(-length // (ALIGN * ranks)) * ALIGN


def _free(tensor):
    tensor.untyped_storage().resize_(0)


def _allocate(tensor):
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
