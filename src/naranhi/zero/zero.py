"""ZeRO: data parallelism in which each rank keeps a piece of the model's state instead of a copy.

Stage 1 shards the optimizer's state, stage 2 the gradients as well, stage 3 the parameters as well.
Every rank still computes with the whole model on its share of the batch, as in `data_parallel`
(whose rule for the loss holds here); what it does not keep is sent to it when it needs it.

    zero = Zero(model, stage=3)
    optimizer = torch.optim.AdamW(zero.param_groups, lr=1e-3)    # after sharding, over the shards
    with zero.no_sync():                                   # micro-batches, if there are several
        for inputs, targets in shares[:-1]:
            (loss(model(inputs), targets) / count).backward()
    (loss(model(inputs), targets) / count).backward()      # the last
    zero.clip_grad_norm_(1.0)                                         # if wanted
    zero.step(optimizer)                                   # or zero.zero_grad(), to leave one out

The model is cut into *units*, each of them moved as one row of numbers (`flat_param.FlatParam`). At
stage 3:

    forward    gather a unit just before it computes, and the next while it does; free it after
    backward   the same from the last to the first; what a unit's backward has put into its row of
               gradients is reduce-scattered while the unit before it computes
    step       each rank changes its own shards

At stage 2 parameters stay whole, and are gathered once, after the step; at stage 1 gradients stay
whole too, and are summed by the last backward of a step only. That is any backward that begins
outside of `no_sync()`; there is one in a step. Messages match by order: all ranks have to run the
same units in the same order.

Sources: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models"
(2020); Zhao et al., "PyTorch FSDP: Experiences on scaling fully sharded data parallel" (2023), for
the hooks and for gathering ahead. In production: `fully_shard`, and DeepSpeed.
"""

from contextlib import contextmanager

import torch.distributed as dist

from naranhi.collectives.chunks import overlap
from naranhi.data_parallel import broadcast_buffers, broadcast_parameters
from naranhi.data_parallel.supported import require_same_parameters, require_supported
from naranhi.data_parallel.sync import require_same_gradients
from naranhi.distributed import agree
from naranhi.tensor_parallel.gradient_norm import norm_of_parts, norm_power, scale_to, split_over
from naranhi.zero import checkpoint
from naranhi.zero.memory import held
from naranhi.zero.passes import Passes
from naranhi.zero.step_checks import require_finite, require_own, require_trained
from naranhi.zero.units import cut


class Zero(Passes):
    """The model sharded over the ranks; see the module for how a step goes.

    model: made on every rank alike; construction calls `broadcast_parameters`.
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
    finite: whether the last backward of a step raises FloatingPointError, naming a parameter, where
        a gradient is infinite or NaN. (`clip_grad_norm_` finds that out in any case.)
    tell: called as tell(event, name of the unit): "gather" and "gathered" when it begins and when
        it is known to have been, "compute" before its forward and before its backward, "free";
        "reduce" and "reduced" when its gradients begin to be summed and are known to have been.

    A parameter that gets no gradient in a step, on any rank, is left alone by the optimizer if the
    others of its unit and parameter group get none either; else its gradient is zero (so that its
    weight decays, and goes on with the momentum it had).

    Whole weights are read, saved, copied and loaded in a block:

        with zero.gathered():
            state = model.state_dict()
        with zero.gathered(write=True):
            model.load_state_dict(state)

    Hooks of others see what they would see without ZeRO: a module's run while its unit is gathered,
    a gradient's before it is summed. After that `.grad` is no gradient, and says so when it is used
    (`absent_gradient`): `torch.nn.utils.clip_grad_norm_` would be wrong, and Zero's own is right.

    What a unit takes and gives back may be nested in tuples, lists, dicts and dataclasses. Tensors
    in other objects are not seen: at stage 3 a backward through them finds no parameters.
    """

    def __init__(
        self,
        model,
        stage,
        units=None,
        groups=None,
        precision="fp32",
        group=None,
        tell=None,
        buffers=True,
        finite=False,
    ):
        if stage not in (1, 2, 3):
            raise ValueError(f"stage must be 1, 2 or 3, not {stage!r}")
        if precision not in ("fp32", "mixed"):
            raise ValueError(f"precision must be 'fp32' or 'mixed', not {precision!r}")
        self.group = group or dist.group.WORLD
        self.model, self.stage, self.precision, self.buffers = model, stage, precision, buffers
        self.finite = finite
        self.tell = tell or (lambda event, unit: None)
        self.names = {one: name for name, one in model.named_parameters() if one.requires_grad}
        if not self.names:
            raise ValueError("no parameter of this model requires a gradient")
        require_supported(model, self.group)
        broadcast_parameters(model, self.group)
        agree(self.group, buffers=buffers, finite=finite)
        self.units, options = cut(model, units, groups, stage, precision, self.group)
        self.root = self.units[-1]
        self.flats = [flat for unit in self.units for flat in unit.trained]
        self._options = options  # of each parameter group
        super().__init__()

    @property
    def param_groups(self):
        """The shards as parameter groups, for an element-wise optimizer of torch's. New dicts each
        time, because an optimizer writes its defaults into those that it is given."""
        return [
            {
                "params": [flat.pieces[number] for flat in self.flats if number in flat.pieces],
                **options,
            }
            for number, options in enumerate(self._options)
        ]

    # --- gradients -------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self):
        """Backwards that begin inside add to this step's gradients, and are not its last. At stage
        1 they send nothing; at stages 2 and 3 sums are due all the same, as no rank keeps more."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def synchronize(self):
        """End the step's sums, if that is still to be done, since all its backwards were in
        `no_sync()` (or, on a rank, there was none). `clip_grad_norm_` and `step` call it, on every
        rank."""
        self._require_end()
        if not self._complete:
            self._last = True
            require_same_parameters(self.model, self.names, "Zero")
            self._meet(False)
            self._backward.begin(None)
            self._end_backward()
        if not self._complete:
            raise RuntimeError(
                "no parameter has a gradient in this step, on any rank: run a backward first"
            )

    def _end_of_sums(self):
        """All ranks know by now who has which gradient."""
        require_same_gradients(self.names.values(), self._reductions.seen)
        if not any(flat.seen for flat in self.flats):  # torch.autograd.grad, say: nobody has any
            self._forget()
            return
        require_trained(self.flats)
        if self.buffers:
            broadcast_buffers(self.model, self.group)
        if self.finite:
            require_finite(self.flats, self.group)
        self._complete = True
        for flat in self.flats:
            flat.hide_gradients()

    # --- step ------------------------------------------------------------------------------------

    def shard_gradients(self):
        """The gradients of this rank's shards, sums over the ranks: scaled in place, they are what
        `step` works with. Every element of a gradient is in one shard of one rank of `group`."""
        self.synchronize()
        return [flat.gradient for flat in self.flats]

    def norm_power(self, norm_type=2.0):
        """What this rank's shards add to the norm of all: see `gradient_norm.norm_power`."""
        return norm_power(self.shard_gradients(), norm_type)

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients down to a global norm of at most `max_norm`; the norm they had.

        The norm of the whole model, as `torch.nn.utils.clip_grad_norm_` has it in one process: over
        all ranks' shards, and over the tensor groups whose ranks hold parts of a layer, all ranks
        of which call this too. Raises FloatingPointError on every rank, before anything is scaled,
        where it is not finite.
        """
        split, gradients = split_over(self.model), self.shard_gradients()
        parts = {None: [] if split else gradients, **{group: [] for group in split.values()}}
        if split:
            for flat in self.flats:
                for parameter, part in zip(flat.parameters, flat.gradient_parts(), strict=True):
                    parts[split.get(parameter)].append(part)
        norm = norm_of_parts(parts, norm_type, [self.group], gradients[0].device)
        scale_to(gradients, max_norm, norm)
        return norm

    def step(self, optimizer):
        """Let the optimizer change this rank's shards, and the model follow."""
        require_own(optimizer, self.flats)
        self._whole.require_outside("step()")
        self.synchronize()
        for flat in self.flats:
            flat.give_gradients()
        optimizer.step()
        self._forget()
        self.follow()

    def zero_grad(self):
        """Forget the gradients of this step, and what a forward or backward that has failed left
        behind. Call it on every rank, at the same point of the step."""
        self._reductions.finish()
        self._forget()
        for unit in self.units:
            unit.settle()
        self._backward.end()
        self._reductions.reset()
        self._gathering.order.begin(True)
        self.free()

    def _forget(self):
        for flat in self.flats:
            flat.forget_gradients()
        self._complete = self._met = False

    def free(self):
        """Let no unit be gathered: there may be the root, of a forward without a backward."""
        self._gathering.free_all()

    def follow(self, flats=None):
        """Let the model follow the masters of these flats, by default all trained ones, which have
        changed."""
        flats = self.flats if flats is None else flats
        for flat in flats:
            flat.refresh()
        self.free()
        if self.stage < 3:
            overlap(flat.gathering() for flat in flats)

    # --- between steps ---------------------------------------------------------------------------

    def save(self, folder, optimizer):
        """Write the state of model and optimizer; see `checkpoint.save`."""
        require_own(optimizer, self.flats)
        checkpoint.save(self, folder, optimizer)

    def load(self, folder, optimizer):
        """Read it, also on another number of ranks; see `checkpoint.load`."""
        require_own(optimizer, self.flats)
        self._whole.require_outside("load()")
        checkpoint.load(self, folder, optimizer)

    def held(self, optimizer=None):
        """{kind: bytes of model state that this rank holds now}; see `memory.held`."""
        return held(self, optimizer)

    def gathered(self, write=False):
        """A block in which the model's parameters are whole. Call it on every rank.

        In mixed precision they are the masters then, in fp32. What is taken out (a `state_dict`, a
        copy of the model) stays valid. With `write`, what the block changes in them is kept; all
        ranks have to change the same, or ValueError names a parameter. Otherwise, and after that
        error, changes are lost. (At stages 1 and 2 in fp32 parameters are always whole, in memory
        of their own: changes are made at once.)
        """
        return self._whole.gathered(write)

    def close(self):
        """Leave the model alone from now on, with all its parameters whole and as they were trained
        (in mixed precision, in fp32 again). Call it on every rank."""
        self._whole.gather()
        self._handles.remove()
        self._forget()
