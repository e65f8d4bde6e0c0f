"""The sharded model as its user sees it; `hooks` is what autograd and modules call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from naranhi.collectives.chunks import overlap
from naranhi.data_parallel import broadcast_parameters
from naranhi.data_parallel.supported import require_same_parameters, require_supported
from naranhi.distributed import agree
from naranhi.tensor_parallel.gradient_norm import norm_of_parts, norm_power, scale_to
from naranhi.tensor_parallel.sequence_gradients import sum_before_other_hooks
from naranhi.zero.experts import copies_of_experts, parts_by_groups, require_own_loss
from naranhi.zero.hooks import Hooks
from naranhi.zero.memory import held
from naranhi.zero.phase import Phase
from naranhi.zero.step_checks import (
    axes_of,
    require_arguments,
    require_own,
    require_own_memory,
    warn_of_one_unit,
)
from naranhi.zero.units import cut

if TYPE_CHECKING:
    import torch
    from torch import nn

    from naranhi.distributed.agreement import Axes
    from naranhi.zero.flat_param import FlatParam
    from naranhi.zero.units import Unit


class Zero(Hooks):
    """A model sharded over the ranks; see the package for how a step goes.

    Args:
        model: Built alike on every rank; construction calls `broadcast_parameters`.
        stage: 1, 2 or 3.
        units: Modules, each communicated as a whole, none inside another; by default the model's
            children (and those of its lists of modules). Other parameters, and those shared with
            modules outside of their unit, belong to the root, which at stage 3 stays gathered from
            the forward to the end of the backward. A unit may be a tuple of modules that run one
            after another, none calling another: this is faster for small ones (`zero.joined`).
        param_groups: Parameter groups of the model's parameters, as torch optimizers expect them.
        precision: "fp32" computes in the parameters' dtype. "bf16" computes in bf16, and reduces
            gradients in bf16 too, while the optimizer works on a copy in fp32. The model's inputs
            and outputs are still fp32.
        group: The process group over which the state is sharded, except that of experts; None for
            the default group.
        replicas: The ranks with the same shard in other groups, if several groups hold a copy of
            the model each: *hybrid sharding*. All-gathers stay within `group`; only this rank's
            shard of the gradients is summed over `replicas`, once a step.
        on_event: Called as on_event(event, name of the unit): "gather" and "gathered" when its
            all-gather starts and when it is known to have ended, "compute" before its forward and
            before its backward, "free"; likewise "reduce" and "reduced", "sum" and "summed".
        buffers: Whether `broadcast_buffers` follows the reduction of a step's gradients.
        check_finite: Whether the last backward of a step raises FloatingPointError, naming a
            parameter, if a gradient is not finite (`clip_grad_norm_` does, and over all groups).

    The optimizer skips a parameter that has no gradient in a step, on any rank, if no other
    parameter of its unit and parameter group has one; otherwise the gradient is zero (so weight
    decay and momentum still apply).

    Other hooks see the same values as without ZeRO: a module's hooks run while its unit is
    gathered, a gradient's before it is reduced. After the reduction `.grad` holds a stand-in that
    raises when it is used (`absent_gradient`), because `torch.nn.utils.clip_grad_norm_` would be
    wrong: call `clip_grad_norm_` of Zero.

    A unit's inputs and outputs may be nested in tuples, lists, dicts and dataclasses. Tensors in
    other objects are not seen: at stage 3 a backward through them finds no parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        *,
        units: Iterable[nn.Module | Iterable[nn.Module]] | None = None,
        param_groups: Iterable[dict[str, Any]] | None = None,
        precision: str = "fp32",
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        on_event: Callable[[str, str], object] | None = None,
        buffers: bool = True,
        check_finite: bool = False,
    ) -> None:
        self.group: dist.ProcessGroup = group or dist.group.WORLD
        self.axes: Axes = axes_of(self.group, replicas)
        self.model: nn.Module = model
        self.stage: int = stage
        self.precision: str = precision
        self.buffers: bool = buffers
        self.check_finite: bool = check_finite
        self.on_event: Callable[[str, str], object] = on_event or (lambda event, unit: None)
        self.names: dict[nn.Parameter, str] = {
            p: name for name, p in model.named_parameters() if p.requires_grad
        }
        require_arguments(stage, precision, self.names, self.axes)
        require_supported(model, self.axes, experts=True)
        require_own_memory(model, self.axes)
        copies = copies_of_experts(model)
        broadcast_parameters(model, self.axes, apart=copies)
        agree(self.axes, buffers=buffers, check_finite=check_finite)
        sum_before_other_hooks(model)
        made, self._options = cut(model, units, param_groups, stage, precision, self.axes, copies)
        require_own_loss(made[:-1], stage)
        if stage == 3 and units is None:
            warn_of_one_unit(made)
        self.units: list[Unit] = made
        self.root: Unit = made[-1]
        self.flats: list[FlatParam] = [flat for unit in self.units for flat in unit.trained]
        super().__init__()

    @property
    def phase(self) -> Phase:
        """Return where the step stands, as all ranks know it."""
        return self._phase

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the shards as parameter groups, for an element-wise optimizer of torch's.

        The dicts are new each time, because an optimizer writes its defaults into them.
        """
        return [
            {"params": [flat.pieces[n] for flat in self.flats if n in flat.pieces], **options}
            for n, options in enumerate(self._options)
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards that begin inside add to this step's gradients without ending the step.

        At stage 1 they send nothing; at stages 2 and 3 their gradients are reduced all the same,
        because no rank keeps more than its shard.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def synchronize(self) -> None:
        """End the step's reductions, unless its last backward has done so.

        Call it on every rank if all backwards were in `no_sync()` (or, at stages 1 and 2, if a rank
        had none: at stage 3 the others wait for it). `clip_grad_norm_` and `step` call it, too.

        Raises:
            RuntimeError: If no parameter has a gradient in this step, on any rank.
        """
        self._require_end()
        if self._phase is not Phase.REDUCED:
            self._require_kept()
            require_same_parameters(self.model, self.names, "Zero")
            self._announce(False)
            self._phase = Phase.REDUCING
            self._backward.begin(None)
            self.root_post_backward()
        if self._phase is not Phase.REDUCED:
            raise RuntimeError(
                "no parameter has a gradient in this step, on any rank: run a backward first"
            )

    def shard_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank's shards, which are sums over the ranks.

        `step` works with these tensors, so they can be scaled in place. Every element of a gradient
        is in one shard of one rank of `group`; those of experts may be on others (`experts`).
        """
        self.synchronize()
        return [flat.gradient for flat in self.flats]

    def norm_power(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return this rank's contribution to a norm (see `gradient_norm.norm_power`), as a tensor.

        Args:
            norm_type: The order of the norm; `inf` for the largest absolute value.
        """
        return norm_power(self.shard_gradients(), norm_type)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, across: Sequence[dist.ProcessGroup] = ()
    ) -> float:
        """Scale the gradients to a global norm of at most `max_norm`; return the norm they had.

        The norm is that of the whole model, as `torch.nn.utils.clip_grad_norm_` computes it in one
        process: over all ranks' shards, and over the groups whose ranks hold parts of a layer or
        different experts. All of these ranks must call this.

        Args:
            max_norm: The largest norm that the gradients may keep, above 0.
            norm_type: The order of the norm, above 0; `inf` for the largest absolute value.
            across: Further groups over whose ranks the model is distributed, such as a pipeline's.

        Raises:
            FloatingPointError: On every rank, before anything is scaled, if the norm is not finite.
        """
        gradients = self.shard_gradients()
        parts = parts_by_groups(self.model, self.flats, self.group)
        norm = norm_of_parts(parts, norm_type, across, gradients[0].device)
        scale_to(gradients, max_norm, norm)
        return norm

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer update the shards, update the model, and discard the gradients."""
        require_own(optimizer, self.flats)
        self._whole.require_outside("step()")
        self.synchronize()
        for flat in self.flats:
            flat.set_shard_grads()
        optimizer.step()
        self._forget()
        self.refresh(self.flats)

    def zero_grad(self) -> None:
        """Discard the gradients of this step, and what a failed forward or backward left behind.

        Call it on every rank, at the same point of the step: no check notices a rank that continues
        alone after an error, and its gradients are summed with those of a different step.
        """
        try:
            self._gradients.finish_all()
        finally:
            self._forget()
            for unit in self.units:
                unit.settle()
            self._backward.end()
            self._parameters.order.begin(True)
            self.reshard()

    def reshard(self) -> None:
        """Free every unit; after a forward without a backward, the root may still be gathered."""
        self._parameters.reshard_all()

    def refresh(self, flats: Sequence[FlatParam] | None = None) -> None:
        """Update the model from the masters of flat parameters, which have changed.

        Args:
            flats: The changed flat parameters; by default all, including frozen ones.
        """
        flats = self._whole.flats if flats is None else flats
        for flat in flats:
            flat.refresh()
        self._whole.note_versions(flats)
        self.reshard()
        if self.stage < 3:
            overlap(flat.all_gather() for flat in flats)

    def require_between_steps(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Raise RuntimeError unless the masters hold the model's state and `optimizer` trains them.

        Args:
            optimizer: The optimizer of these shards; None without one.
        """
        if optimizer is not None:
            require_own(optimizer, self.flats)
        self._whole.require_outside("saving or loading a checkpoint")

    def memory(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
        """Return {kind: bytes of model state that this rank holds now}; see `memory.held`.

        Args:
            optimizer: The optimizer of these shards; None leaves its state out.
        """
        return held(self, optimizer)

    def gathered(self, write: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the model's parameters are whole. Call it on every rank.

        In mixed precision they are the masters, in fp32. A `state_dict` or a copy of the model that
        is taken inside stays valid. (At stages 1 and 2 in fp32 the model is always whole:
        changes take effect at once and stay, and a `state_dict` changes with the next step.)

        Args:
            write: Whether to keep the block's changes to the parameters; otherwise they are lost.

        Raises:
            ValueError: At the end of the block, with `write`, unless all ranks have made the same
                changes; it names a parameter. The changes are lost, except as said above.
        """
        return self._whole.gathered(write)

    def close(self) -> None:
        """Detach from the model, and leave all its parameters whole and as they were trained.

        In mixed precision they are in fp32 again. Call it on every rank.
        """
        if self._handles.removed:  # a second call would put back the values of the first
            return
        self._whole.require_outside("close()", moved=True)
        self._whole.unshard()
        self._handles.remove()
        self._forget()
