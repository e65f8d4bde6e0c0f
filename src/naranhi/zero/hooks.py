"""The hooks by which ZeRO gathers, frees and reduces units during a forward and a backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from naranhi.autograd.containers import (
    map_tensors,
    put_into,
    tensors_of,
    to_bf16,
    to_fp32,
    watch_backward,
    write_back,
)
from naranhi.autograd.hooks import Attached, Backward, Handles, Hook, ModuleHook
from naranhi.data_parallel import broadcast_buffers
from naranhi.data_parallel.supported import require_gradient, require_same_parameters
from naranhi.data_parallel.sync import require_same_gradients
from naranhi.zero.gradients import Gradients
from naranhi.zero.parameters import Parameters
from naranhi.zero.phase import Phase
from naranhi.zero.step_checks import (
    require_all,
    require_finite,
    require_kept,
    require_own_output,
    require_trained,
)
from naranhi.zero.whole import Whole

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from naranhi.distributed.agreement import Axes
    from naranhi.zero.flat_param import FlatParam
    from naranhi.zero.units import Unit


class Hooks(Attached):
    """The hooks of a sharded model: the part of `zero.Zero` that autograd and modules call."""

    group: dist.ProcessGroup
    axes: Axes
    model: nn.Module
    stage: int
    precision: str
    buffers: bool
    on_event: Callable[[str, str], object]
    names: dict[nn.Parameter, str]
    units: list[Unit]
    root: Unit
    flats: list[FlatParam]

    def __init__(self):
        self._parameters = Parameters(self.units, self.stage, self.on_event)
        self._gradients = Gradients(self.units, self.names, self.stage, self.axes, self.on_event)
        self._backward = Backward()
        self._phase = Phase.ACCUMULATING
        self._sync = True  # outside of no_sync()
        self._accumulated = False  # a backward of this step is over
        self._differentiable = False  # a backward of this step had create_graph=True
        self._whole = Whole(self)
        self._copies = []  # of the inputs of modules that are in their forward now
        self._handles = Handles(others=self._whole.hooks())
        self._listen(copying=self._whole.require_readable)

    def _listen(self, **options):
        for unit in self.units:
            for module in unit.modules:
                keep = unit is self.root  # the model keeps this object alive until close()
                before = ModuleHook(self.pre_forward, unit, keep=keep, **options)
                after = ModuleHook(self.post_forward, unit, **options)
                first = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                self._handles.first.append(first)
                self._handles.last.append(module.register_forward_hook(after, with_kwargs=True))
            for parameter in unit.flat_of:
                self._handles.last.append(
                    parameter.register_post_accumulate_grad_hook(Hook(self._arrived, unit.number))
                )

    # --- forward ---------------------------------------------------------------------------------

    def pre_forward(
        self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard the unit; return the module's inputs, watched for the end of its backward."""
        if self._whole.passes_by():
            return args, kwargs
        self._require_end()
        if unit is self.root and not self._backward.running:
            self._begin_forward(torch.is_grad_enabled())
        inputs, copies = (args, kwargs), []
        if self.precision == "bf16" and not self._whole.state:
            inputs = map_tensors(to_bf16, inputs, copies)
        self._parameters.unshard(unit, module is unit.modules[0], self._whole.state)
        if self._backward.running:  # recomputation; awaited gradients mark its end
            if torch.is_grad_enabled() and unit.hidden[module]:
                unit.hidden[module] -= 1
                # Frozen parameters too: their gradient never arrives, so the unit stays gathered.
                own = set(module.parameters())
                unit.awaited.update(
                    param for flat in unit.flats for param in flat.parameters if param in own
                )
        elif torch.is_grad_enabled() and unit is not self.root:
            used = Hook(self.post_backward, unit.number, module is unit.modules[0])
            inputs = watch_backward(used, inputs, copies)
        self._copies.append(copies)
        return inputs

    def _begin_forward(self, recording):
        # Autograd would run the casts of an earlier forward after the end of this one's backward.
        torch.clear_autocast_cache()
        self._whole.require_forward(recording)
        self._handles.order()
        self._parameters.order.begin(recording)
        self._copies.clear()  # left by a forward that has failed
        if self._sync and recording and self._phase is not Phase.REDUCED:
            self._announce(True)

    def post_forward(
        self,
        unit: Unit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """Reshard the unit; return the output, watched for the beginning of its backward."""
        if self._whole.passes_by():
            return output
        write_back(self._copies.pop())
        if self._backward.running:
            return output
        if self.stage == 3:
            require_own_output(unit, output)
        recorded = watched = False
        if torch.is_grad_enabled():
            last, whole = module is unit.modules[-1], bool(self._whole.state)
            before = Hook(self.pre_backward, unit.number, last, whole)
            inputs = (args, kwargs) if unit is not self.root else ()  # which is not watched
            for tensor in (*tensors_of(output), *put_into(inputs)):
                if tensor.grad_fn is not None:
                    tensor.register_hook(before)
                    recorded = True
            watched = any(tensor.requires_grad for tensor in tensors_of(inputs))
        unit.uses += recorded or watched
        unit.hidden[module] += self._parameters.order.recording and not torch.is_grad_enabled()
        if unit is not self.root:
            if module is unit.modules[-1]:
                self._parameters.reshard(unit)
            return output
        if not recorded:
            self._parameters.end_pass()
        mixed = self.precision == "bf16" and not self._whole.state
        return map_tensors(to_fp32, output) if mixed else output

    # --- backward --------------------------------------------------------------------------------

    def pre_backward(self, number: int, last: bool, whole: bool, gradient: torch.Tensor) -> None:
        """Unshard a unit; `last`: of its last module; `whole`: its forward was in `gathered()`."""
        self._whole.require_backward(whole)
        self._begin_backward()
        self._parameters.unshard(self.units[number], last, self._whole.state)

    def _begin_backward(self):
        if self._backward.running:
            return
        self._require_end()
        self._require_kept()
        if self.stage == 3 and torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True goes through parameters that stage 3 frees at "
                "its end, before what it computes is differentiated again: use stage 1 or 2"
            )
        self._differentiable |= torch.is_grad_enabled()
        if self._sync and self._phase is not Phase.REDUCED:  # the last backward of the step
            require_same_parameters(self.model, self.names, "Zero")
            if self._phase is not Phase.ANNOUNCED:  # its forward was in no_sync()
                self._announce(True)
            self._phase = Phase.REDUCING
        self._handles.order()
        self._backward.begin(self.root_post_backward)

    def _arrived(self, number, parameter):
        """Note that the backward has accumulated a parameter's gradient."""
        self._begin_backward()
        if self._phase is Phase.REDUCED:
            raise RuntimeError(
                f"parameter {self.names[parameter]} gets a gradient, but this step's gradients are "
                "summed already: call step() or zero_grad() of Zero before another backward"
            )
        unit = self.units[number]
        if unit.done:
            raise RuntimeError(
                f"parameter {self.names[parameter]} gets a gradient after its unit's backward has "
                "ended: use it outside the forward only after the forward, and run a separate "
                "backward for graphs from before the last backward"
            )
        require_gradient(self.names[parameter], parameter.grad)
        self._gradients.advance()
        if parameter in unit.awaited:
            unit.awaited.remove(parameter)
            if self._is_over(unit):
                self._finish(unit)

    def post_backward(self, number: int, first: bool) -> None:
        """Note that the backward of one use of a unit's module is over."""
        unit = self.units[number]
        unit.uses -= 1
        if self._is_over(unit):
            self._finish(unit)
        elif first:
            self._parameters.reshard(unit)

    def _is_over(self, unit):
        # With create_graph=True a later backward may use the unit again: not over before the end.
        return unit.over and not self._differentiable

    def _finish(self, unit):
        """End a unit's backward."""
        unit.done = True
        self._parameters.reshard(unit)
        self._sum()

    def _sum(self):
        """Reduce gradients of units that are done; at stage 1, in a step's last backward only."""
        if self._phase is Phase.REDUCING or (self.stage > 1 and self._phase is not Phase.REDUCED):
            self._gradients.reduce(self._phase is Phase.REDUCING)

    def root_post_backward(self) -> None:
        """End a backward: reshard all units, and finish their reductions."""
        for unit in self.units:
            unit.done = True
            self._parameters.reshard(unit)
        self._sum()
        self._gradients.finish_all()
        for unit in self.units:
            unit.settle()
        self._parameters.end_pass()
        if self._phase is Phase.REDUCING:
            self._end_reduction()
        else:
            self._hide_shards()
        self._backward.end()

    def _end_reduction(self):
        """Check the step's gradients; by now all ranks know which rank has which."""
        require_same_gradients(self.names.values(), self._gradients.seen)
        self._gradients.adopt_order()
        if not any(flat.seen for flat in self.flats):  # after torch.autograd.grad, for example
            self._forget()
            return
        require_trained(self.flats)
        if self.buffers:
            broadcast_buffers(self.model, self.axes)
        if self.check_finite:
            require_finite(self.flats, self.axes)
        self._phase, self._differentiable = Phase.REDUCED, False
        for flat in self.flats:
            flat.hide_gradients()
        self._hide_shards()

    def _hide_shards(self):
        for flat in self.flats:
            flat.hide_shards()
        self._accumulated = True

    def _forget(self):
        for flat in self.flats:
            flat.zero_grad()
        self._phase, self._accumulated = Phase.ACCUMULATING, False

    # --- checks ----------------------------------------------------------------------------------

    def _announce(self, has_forward):
        """Raise on all ranks, at stage 3, if only some ranks have a forward in this step.

        Call it before the messages of a step's last forward: the other ranks would wait for the
        shards of a rank without a forward.
        """
        if self.stage == 3:
            require_all(has_forward, self.axes, self.flats[0].shard.device)
        self._phase = Phase.ANNOUNCED

    def _require_kept(self):
        if self._accumulated and self._phase is not Phase.REDUCED:
            require_kept(self.flats)

    def _require_end(self):
        if self._backward.failed:
            raise RuntimeError("the last backward did not finish: call zero_grad() first")
