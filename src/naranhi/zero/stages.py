"""ZeRO for the stages of a pipeline: no hooks, because the schedule says when to communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from naranhi.collectives.chunks import overlap
from naranhi.data_parallel.supported import require_same_parameters
from naranhi.data_parallel.sync import have_gradients, require_same_gradients
from naranhi.tensor_parallel.sequence_gradients import sum_before_reduction
from naranhi.zero.phase import ParamState, Phase
from naranhi.zero.zero import Zero

if TYPE_CHECKING:
    import torch.distributed as dist

    from naranhi.zero.units import Unit


class ZeroStages(Zero):
    """A rank's stages, each a unit, sharded over the ranks with the same stages (`replicas`).

        with Pipeline(layers, schedules.with_sharding(schedule, 3), loss,
                      group=mesh.pipeline, replicas=mesh.data, sharding=ZeroStages) as pipeline:
            optimizer = AdamW(pipeline.sharded.param_groups)
            pipeline.step(inputs, targets, count)
            pipeline.sharded.step(optimizer)

    There are no hooks on modules, because they would gather a unit again for each micro-batch. All
    else is as in `Zero`.

    Args:
        stages: {stage number: its layers}, for this rank's stages.
        stage: The stage of ZeRO, 2 or 3.
        group: The ranks over which the stages are sharded.
        param_groups: Makes the parameter groups from an iterator of (name in the whole model,
            parameter) over this rank's stages, as many on every rank; by default one group. Pass it
            by `Pipeline(sharding=partial(ZeroStages, param_groups=...))`.
        on_event: As in `Zero`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        stage: int,
        group: dist.ProcessGroup,
        *,
        param_groups: Callable[[Iterator[tuple[str, nn.Parameter]]], Iterable[dict[str, Any]]]
        | None = None,
        on_event: Callable[[str, str], object] | None = None,
    ) -> None:
        model = nn.ModuleDict({f"stage {number}": module for number, module in stages.items()})
        super().__init__(
            model,
            stage,
            units=model.values(),
            param_groups=param_groups and param_groups(_named(stages)),
            group=group,
            on_event=on_event,
            buffers=False,
        )
        self._unit_of: dict[int, Unit] = dict(zip(stages, self.units, strict=False))

    def _listen(self, **options: Any) -> None:
        """Put no hooks at the modules."""

    # --- actions ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Raise RuntimeError inside a `gathered` block, or if the last step's gradients remain.

        Also raise it if a parameter became trainable after the stages were made.
        """
        self._whole.require_outside("Pipeline.step()")
        if self._phase is Phase.REDUCED and torch.is_grad_enabled():
            raise RuntimeError(
                "the gradients of the step before are still there: call step() or zero_grad() of "
                "the pipeline's `sharded` first"
            )
        if torch.is_grad_enabled():
            require_same_parameters(self.model, self.names, "the pipeline's `sharded`")

    def unshard(self, stage: int) -> None:
        """Start to gather a stage's parameters."""
        self._parameters.start(self._unit_of[stage])

    def wait(self, stage: int) -> None:
        """Wait for a stage's all-gather, and advance the reduction in flight."""
        self._gradients.advance(early=False)
        if self._unit_of[stage].state is ParamState.UNSHARDING:
            self._parameters.wait(self._unit_of[stage])

    def reshard(self, stage: int | None = None) -> None:
        """Free a stage's parameters, or those of all stages."""
        if stage is None:
            super().reshard()
        else:
            self._parameters.reshard(self._unit_of[stage])

    def reduce_grad(self, stage: int) -> None:
        """Start to reduce a stage's gradients, once the reduction in flight is over.

        Partial sums on tensor ranks are summed first: without hooks no backward sums them.
        """
        sum_before_reduction(self.model[f"stage {stage}"])
        self._gradients.start(self._unit_of[stage])

    def finish(self) -> None:
        """End the reductions of a step."""
        self._gradients.finish_all()
        seen = {param for flat in self.flats for param in flat.seen}
        self._gradients.seen, kernel = have_gradients(
            [param in seen for param in self.names], self.axes, self.flats[0].shard.device
        )
        overlap([kernel])
        if any(flat.seen for flat in self.flats):
            return self._end_reduction()
        # As in one process: these stages are not updated, although other stages may be.
        require_same_gradients(self.names.values(), self._gradients.seen)
        self._phase = Phase.REDUCED
        self._hide_shards()

    # --- around a step ---------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Raise RuntimeError unless the schedule has reduced the gradients of a step."""
        if self._phase is not Phase.REDUCED:
            raise RuntimeError("there are no gradients of these stages: run Pipeline.step first")

    @contextmanager
    def shapes(self, stage: int) -> Iterator[None]:
        """Give a stage's parameters their shapes, though not their values, while it is sharded."""
        flats = self._unit_of[stage].flats if self.stage == 3 else ()
        grads = {param: param.grad for flat in flats for param in flat.parameters}
        for flat in flats:
            flat.use_unsharded()
        for param in grads:
            param.grad = None  # perhaps an empty stand-in, until the step is applied
        try:
            yield
        finally:
            for flat in flats:
                flat.reshard()
            for param, grad in grads.items():
                param.grad = grad


def _named(stages):
    """Yield (name in the whole model, parameter) of stages, each parameter once."""
    seen = set()
    for stage in stages.values():
        for prefix, part in stage.named_parts():
            for name, param in part.named_parameters():
                if param not in seen:
                    seen.add(param)
                    yield f"{prefix}.{name}", param
