"""ZeRO: data parallelism in which each rank keeps a piece of the model's state instead of a copy.

Stage 1 shards the optimizer's state, stage 2 the gradients as well, stage 3 the parameters as well.
Every rank still computes with the whole model on its share of the batch, as in `data_parallel`
(whose rule for the loss holds here); what it does not keep is sent to it when it needs it.

    zero = Zero(model, stage=3)
    optimizer = torch.optim.AdamW(zero.groups, lr=1e-3)    # after sharding, over the shards
    for inputs, targets in shares[:-1]:                    # micro-batches, if there are several
        (loss(model(inputs), targets) / count).backward()
    with zero.summing():                                   # the last
        (loss(model(inputs), targets) / count).backward()
    zero.clip(1.0)                                         # if wanted
    zero.step(optimizer)                                   # or zero.zero_grad(), to leave one out

The model is cut into *units*, each of them moved as one row of numbers (`shards.Flat`). At stage 3:

    forward    gather a unit just before it computes, and the next while it does; free it after
    backward   the same from the last to the first; what a unit's backward has put into its row of
               gradients is reduce-scattered while the unit before it computes
    step       each rank changes its own shards

At stage 2 parameters stay whole, and are gathered once, after the step; at stage 1 gradients stay
whole too, and are summed in the `summing` block only. Messages match by order: all ranks have to
run the same units in the same order.

Sources: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models"
(2020); Zhao et al., "PyTorch FSDP: Experiences on scaling fully sharded data parallel" (2023), for
the hooks and for gathering ahead. In production: `fully_shard`, and DeepSpeed.
"""

import os
from contextlib import contextmanager
from functools import partial
from math import isfinite

import torch
import torch.distributed as dist

from naranhi import sharded_state
from naranhi.collectives import all_gather
from naranhi.collectives.chunks import overlap
from naranhi.gradient_norm import norm_power, total_norm
from naranhi.held import held
from naranhi.nests import _AfterBackward, _map, _tensors, _to_bf16, _to_fp32
from naranhi.prefetch import Prefetch
from naranhi.replicas import (
    broadcast_buffers,
    have_gradients,
    make_equal,
    require_same_gradients,
)
from naranhi.units import cut


class Zero:
    """The model sharded over the ranks; see the module for how a step goes.

    model: made on every rank alike; construction calls `make_equal`.
    stage: 1, 2 or 3.
    units: modules to be moved as one, none inside of another; by default the model's children
        (and those of its lists of modules). The rest, and what several units share, is the root's,
        which at stage 3 stays gathered from the forward to the end of the backward. A unit may be a
        tuple of modules that run one after the other, none of which calls another: small ones are
        quicker so (`units.joined`).
    groups: parameter groups as a torch optimizer takes them, of the model's parameters.
    precision: "fp32" computes in the dtype that the parameters have; "mixed" in bf16, in which
        gradients are summed too, while an optimizer works on a copy in fp32. The model then still
        takes and returns fp32.
    buffers: whether `broadcast_buffers` ends each step.
    finite: whether the end of `summing` raises FloatingPointError, naming a parameter, where a
        gradient is infinite or no number. (`clip` finds that out in any case.)
    tell: called as tell(event, name of the unit): "gather" and "gathered" when it begins and when
        it is known to have been, "compute" before its forward and before its backward, "free";
        "reduce" and "reduced" when its gradients begin to be summed and are known to have been.

    groups: the shards, for an element-wise optimizer of torch's.

    A parameter that gets no gradient in a step, on any rank, is left alone by the optimizer if the
    others of its unit and parameter group get none either; else its gradient is zero (so that its
    weight decays, and goes on with the momentum it had).

    What a unit takes and gives back may be nested in tuples, lists, dicts and dataclasses. Tensors
    in other objects are not seen: at stage 3 a backward through them finds no parameters.
    """

    def __init__(self, model, stage, units=None, groups=None, precision="fp32", group=None,
                 tell=None, buffers=True, finite=False):
        if stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, not {stage!r}")
        if precision not in ("fp32", "mixed"):
            raise ValueError(f"precision must be 'fp32' or 'mixed', not {precision!r}")
        self.group = group or dist.group.WORLD
        self.model, self.stage, self.precision, self.buffers = model, stage, precision, buffers
        self.finite = finite
        self.tell = tell or _nothing
        self.names = {one: name for name, one in model.named_parameters() if one.requires_grad}
        if not self.names:
            raise ValueError("no parameter of this model requires a gradient")
        make_equal(model, self.group)
        self.units, options = cut(model, units, groups, stage, precision, self.group)
        self.root = self.units[-1]
        self.flats = [flat for unit in self.units for flat in unit.trained]
        self._device = self.flats[0].shard.device
        self.groups = [
            {"params": [flat.pieces[number] for flat in self.flats if number in flat.pieces],
             **option} for number, option in enumerate(options)]

        self._order = Prefetch()
        # Those with gradients, in the order in which these are summed.
        self._sums = [unit for unit in (*self.units[-2::-1], self.root) if unit.trained]
        self._summed = 0  # how many of these in this backward
        self._reduction = None  # the unit and the Transfer under way
        self._in_backward = self._in_block = self._complete = False
        self._hooks = [hook for unit in self.units for hook in self._listen(unit)]

    def _listen(self, unit):
        for module in unit.modules:
            yield module.register_forward_pre_hook(
                partial(self._before_forward, unit), with_kwargs=True)
            yield module.register_forward_hook(
                partial(self._after_forward, unit), with_kwargs=True)
        if unit is self.root and self.stage == 3:
            yield self.model.register_state_dict_pre_hook(self._refuse_state_dict)
        for parameter in unit.flat_of:
            yield parameter.register_post_accumulate_grad_hook(partial(self._arrived, unit))

    def _refuse_state_dict(self, module, prefix, keep_vars):
        if not all(unit.gathered for unit in self.units if unit.flats):
            raise RuntimeError(
                "this model is sharded: read it inside of Zero.gathered(), or use Zero.save()")

    # --- forward ---------------------------------------------------------------------------------

    def _before_forward(self, unit, module, args, kwargs):
        self._require_end()
        if unit is self.root and not self._in_backward:
            self._order.begin(torch.is_grad_enabled())
            if self.precision == "mixed":
                args, kwargs = _map(_to_bf16, (args, kwargs))
            if self._in_block and torch.is_grad_enabled():
                self._meet(True)
        self._need(unit, module is unit.modules[0])
        if self._in_backward:  # computed again; and if not recorded before, nothing else will tell
            if torch.is_grad_enabled() and unit.hidden[module]:
                unit.hidden[module] -= 1
                # Also what is frozen, whose gradient never comes: then the unit stays to the end.
                own = set(module.parameters())
                unit.awaited.update(
                    one for flat in unit.flats for one in flat.parameters if one in own)
        elif torch.is_grad_enabled() and unit is not self.root:
            args, kwargs = self._watch(unit, module, args, kwargs)
        return args, kwargs

    def _watch(self, unit, module, args, kwargs):
        """What a module of the unit takes, passed through `_AfterBackward`."""
        inputs = [one for one in _tensors((args, kwargs)) if one.requires_grad]
        if not inputs:
            return args, kwargs
        new = _AfterBackward.apply(partial(self._used, unit, module), *inputs)
        new = dict(zip(map(id, inputs), new, strict=True))
        return _map(lambda one: new.get(id(one), one), (args, kwargs))

    def _after_forward(self, unit, module, args, kwargs, output):
        if self._in_backward:
            return output
        recorded = watched = False
        if torch.is_grad_enabled():
            for one in _tensors(output):
                if one.requires_grad:
                    one.register_hook(partial(self._before_backward, unit, module))
                    recorded = True
            watched = unit is not self.root and any(
                one.requires_grad for one in _tensors((args, kwargs)))
        unit.uses += recorded or watched
        unit.hidden[module] += self._order.recording and not torch.is_grad_enabled()
        if unit is not self.root:
            if module is unit.modules[-1]:
                self._free(unit)
            return output
        if not recorded:
            self._end_pass()
        return _map(_to_fp32, output) if self.precision == "mixed" else output

    # --- backward --------------------------------------------------------------------------------

    def _before_backward(self, unit, module, gradient):
        self._begin_backward()
        self._need(unit, module is unit.modules[-1])

    def _begin_backward(self):
        if not self._in_backward:
            if self._in_block:
                self._meet(True)  # its forward may have been before the block
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _arrived(self, unit, parameter):
        """The backward has a parameter's gradient."""
        self._begin_backward()
        if unit.done:
            raise RuntimeError(
                f"parameter {self.names[parameter]} gets a gradient when its unit's backward is "
                "over: what uses it outside of the forward has to come after the forward")
        if self._complete and self.stage == 1:
            raise RuntimeError(
                f"parameter {self.names[parameter]} gets a gradient, but this step's are summed "
                "already: call step() first, and run one backward only in a summing block")
        unit.flat_of[parameter].take(parameter)
        if self._reduction and self._reduction[1].steps < dist.get_world_size(self.group) - 1:
            self._reduction[1].advance()
        if parameter in unit.awaited:
            unit.awaited.remove(parameter)
            if unit.over:
                self._finish(unit)

    def _used(self, unit, module):
        """One use of a module of a unit has been gone back through."""
        unit.uses -= 1
        if unit.over:
            self._finish(unit)
        elif module is unit.modules[0]:
            self._free(unit)

    def _finish(self, unit):
        """A unit's backward is over."""
        unit.done = True
        self._free(unit)
        self._sum_done()

    def _end_backward(self):
        for unit in self.units:
            unit.done = True
            self._free(unit)
        self._sum_done()
        self._sum_finish()
        for unit in self.units:
            unit.settle()
        self._summed, self._in_backward = 0, False
        self._complete = self._in_block
        self._end_pass()

    # --- parameters ------------------------------------------------------------------------------

    def _need(self, unit, first=True):
        """Have a unit's parameters here; if it begins, those of the next one on their way."""
        if self.stage == 3 and unit.flats:  # the root may have none
            if not unit.held:
                self._gather(unit)
            if first:
                following = self._order.after(unit)
                if following and not following.held:
                    self._gather(following)
            if not unit.gathered:
                self._wait(unit)
        if first:
            self.tell("compute", unit.name)
            # The backend's threads may wait for a core, and other ranks for what they would send.
            _give_way()

    def _gather(self, unit):
        self.tell("gather", unit.name)
        unit.gather()

    def _wait(self, unit):
        try:
            unit.wait()
        except RuntimeError as error:
            raise RuntimeError(f"unit {unit.name} could not be gathered: do all ranks run the same "
                               "units in the same order?") from error
        self.tell("gathered", unit.name)

    def _free(self, unit):
        if self.stage == 3 and unit.held:
            unit.free()
            self.tell("free", unit.name)

    def _end_pass(self):
        """A forward alone, or a backward, is over."""
        self._order.end()
        for unit in self.units:
            self._free(unit)

    # --- gradients -------------------------------------------------------------------------------

    @contextmanager
    def summing(self):
        """Around the last backward of a step. At its end gradients are sums over the ranks."""
        if self._complete:
            raise RuntimeError("this step's gradients are summed already: call step() or "
                               "zero_grad() first")
        self._require_end()
        self._in_block, self._complete, self._met = True, False, False
        try:
            yield
            self._meet(False)
            if not self._complete:  # no backward here
                self._end_backward()
        finally:
            self._in_block = False
        require_same_gradients(self.names.values(), self._seen)
        if self.buffers:
            broadcast_buffers(self.model, self.group)
        if self.finite:
            self._require_finite()

    def _meet(self, here):
        """At stage 3, before a block's first forward: RuntimeError on all ranks where one has none,
        for whose shards the others would wait."""
        if self._met or self.stage < 3:
            return
        self._met = True
        mine = torch.tensor([here], dtype=torch.uint8, device=self._device)
        table = mine.new_empty(dist.get_world_size(self.group), 1)
        all_gather(table, mine, self.group)
        absent = [str(rank) for rank, one in enumerate(table.flatten().tolist()) if not one]
        if absent:
            raise RuntimeError(
                f"rank {', '.join(absent)} runs no forward in this summing block: without a "
                "sample, run the model on rows that do not count")

    def _sum_done(self):
        """Sum the gradients of units that are done, in one order on all ranks."""
        if self.stage == 1 and not self._in_block:
            return
        while self._summed < len(self._sums) and self._sums[self._summed].done:
            unit = self._sums[self._summed]
            self._summed += 1
            self._sum_finish()
            self.tell("reduce", unit.name)
            self._reduction = unit, unit.reduce(*self._telling())

    def _telling(self):
        """Kernels beside a sum: beside a step's last, that tells who has which gradient."""
        if self._in_block and self._summed == len(self._sums):
            seen = {one for flat in self.flats for one in flat.seen}
            self._seen, kernel = have_gradients(
                [one in seen for one in self.names], self.group, self._device)
            yield kernel

    def _sum_finish(self):
        if self._reduction:
            unit, transfer = self._reduction
            transfer.finish()
            unit.reduced()
            self.tell("reduced", unit.name)
            self._reduction = None

    def _require_finite(self):
        bad = next((name for flat in self.flats for name in flat.not_finite()), None)
        told = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, bad, group=self.group)
        ranks = [str(rank) for rank, name in enumerate(told) if name]
        if ranks:
            raise FloatingPointError(
                f"the gradient of parameter {next(filter(None, told))} is not finite: so it is in "
                f"the shard of rank {', '.join(ranks)}")

    # --- step ------------------------------------------------------------------------------------

    def shard_gradients(self):
        """The gradients of this rank's shards, sums over the ranks: scaled in place, they are what
        `step` works with. Every element of a gradient is in one shard of one rank of `group`."""
        self._require_sums()
        return [flat.gradient for flat in self.flats]

    def norm_power(self, norm_type=2.0):
        """What this rank's shards add to the norm of all: see `gradient_norm.norm_power`."""
        return norm_power(self.shard_gradients(), norm_type)

    def clip(self, largest, norm_type=2.0):
        """Scale the gradients down to a global norm of at most `largest`; the norm they had.

        The norm of all of them, over all ranks' shards, as `torch.nn.utils.clip_grad_norm_` has it.
        Raises FloatingPointError on every rank, before anything is scaled, where it is not finite.
        """
        if not largest > 0:
            raise ValueError(f"a norm is clipped to a number above 0, not to {largest!r}")
        norm = total_norm(self.norm_power(norm_type), norm_type, self.group)
        if not isfinite(norm):
            raise FloatingPointError(f"the gradients' norm is {norm}")
        for gradient in self.shard_gradients():
            gradient.mul_(min(1.0, largest / (norm + 1e-6)))
        return norm

    def step(self, optimizer):
        """Let the optimizer change this rank's shards, and the model follow."""
        self._check(optimizer)
        self._require_sums()
        for flat in self.flats:
            flat.give_gradients()
        optimizer.step()
        for flat in self.flats:
            flat.forget_gradients()
        self._complete = False
        self.follow()

    def zero_grad(self):
        """Forget the gradients of this step, and what a forward or backward that has failed left
        behind. Call it on every rank, at the same point of the step."""
        self._sum_finish()
        for flat in self.flats:
            flat.forget_gradients()
        for unit in self.units:
            unit.settle()
        self._summed, self._in_backward, self._complete = 0, False, False
        self._order.begin(True)
        for unit in self.units:
            self._free(unit)

    def _require_end(self):
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            raise RuntimeError("the last backward did not come to its end: call zero_grad() first")

    def _require_sums(self):
        if not self._complete:
            raise RuntimeError("the gradients of this step are not summed over the ranks: run its "
                               "last backward in a summing block")

    def follow(self):
        """Let the model follow the masters, which have changed."""
        for flat in self.flats:
            flat.refresh()
        for unit in self.units:
            self._free(unit)  # there may be the root, of a forward that no backward followed
        if self.stage < 3:
            overlap(flat.gathering() for flat in self.flats)

    def _check(self, optimizer):
        """RuntimeError or TypeError unless the optimizer works on these shards, by element."""
        of_shape = next((one.__name__ for one in type(optimizer).__mro__
                         if one.__name__ in _OF_A_SHAPE), None)
        if of_shape:
            raise TypeError(f"{of_shape} needs the shapes of parameters, which shards do not have")
        theirs = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if theirs != {id(one) for flat in self.flats for one in flat.pieces.values()}:
            raise RuntimeError("this optimizer does not work on the shards of this model: make it "
                               "after Zero, of its groups")

    # --- between steps ---------------------------------------------------------------------------

    def save(self, folder, optimizer):
        """Write the state of model and optimizer; see `sharded_state.save`."""
        self._check(optimizer)
        sharded_state.save(self, folder, optimizer)

    def load(self, folder, optimizer):
        """Read it, also on another number of ranks; see `sharded_state.load`."""
        self._check(optimizer)
        sharded_state.load(self, folder, optimizer)

    def held(self, optimizer=None):
        """{kind: bytes of model state that this rank holds now}; see `held.held`."""
        return held(self, optimizer)

    @contextmanager
    def gathered(self):
        """Inside, the model's parameters are whole, to be read; changes are lost. Call it on every
        rank. At stages 1 and 2 they always are."""
        if self.stage == 3:
            self._gather_all()
        try:
            yield
        finally:
            for unit in self.units:
                self._free(unit)

    def _gather_all(self):
        for unit in self.units:
            if unit.flats and not unit.held:
                self._gather(unit)
            if unit.flats and not unit.gathered:
                self._wait(unit)

    def close(self):
        """Leave the model alone from now on, with all its parameters whole. Call it on every
        rank."""
        if self.stage == 3:
            self._gather_all()
        for hook in self._hooks:
            hook.remove()


# Of torch's and of others': optimizers that see more than single numbers.
_OF_A_SHAPE = {
    "Adafactor", "LBFGS", "Muon", "SparseAdam", "Lamb", "LAMB", "LARS", "Shampoo", "SOAP"}

_give_way = getattr(os, "sched_yield", lambda: None)  # which Windows lacks


def _nothing(event, what):
    pass
