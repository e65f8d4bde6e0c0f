"""Agree on all ranks what each stage of a pipeline takes in the circumstances of a step.

What a layer returns depends on more than its input: on autocast, the grad mode, training or
evaluation, which parameters are frozen. Each rank numbers the circumstances that it meets. Before a
step the ranks exchange these numbers. If their combination is new, the stages are tried in turn; if
it is known, the ranks know what will be sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from naranhi.distributed import from_all_ranks
from naranhi.pipeline import shape_inference
from naranhi.pipeline.dry_run import without_a_trace
from naranhi.pipeline.stage_signature import StageSignature

if TYPE_CHECKING:
    from naranhi.pipeline.sharding import ShardedStages
    from naranhi.pipeline.stage import Stage
    from naranhi.pipeline.tied_weights import TiedWeight


CLOSED = re.compile("closed by peer|reset by peer|[Bb]roken pipe")  # as gloo says it


class StageSignatures:
    """The `StageSignature` before each stage, and after the last, by the circumstances of a step.

    Args:
        stages: {virtual stage: `Stage`} of this rank.
        placement: the rank of each virtual stage.
        group: all ranks of the pipeline, which agree by messages between CPUs.
        trial: "shapes" or "data".
        tied: this rank's `TiedWeight` parameters.
        sharded: the stages as they are sharded over replicas; None if they are whole.
        device: where a stage without parameters and buffers is tried; None for the CPU.
    """

    stages: Mapping[int, Stage]
    placement: Sequence[int]
    group: dist.ProcessGroup | None
    trial: str
    tied: Sequence[TiedWeight]
    sharded: ShardedStages | None
    device: torch.device | None
    rank: int
    ranks: int

    def __init__(
        self,
        stages: Mapping[int, Stage],
        placement: Sequence[int],
        group: dist.ProcessGroup,
        trial: str,
        tied: Sequence[TiedWeight] = (),
        sharded: ShardedStages | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.stages, self.placement, self.group, self.trial = stages, placement, group, trial
        self.tied, self.sharded, self.device = tied, sharded, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._numbers, self._known = {}, {}

    def agree(
        self,
        microbatch: torch.Tensor | tuple[torch.Tensor, ...] | None,
        error: Exception | None = None,
    ) -> tuple[list[StageSignature], int]:
        """Return the signatures in this step's circumstances, and the number of earlier such steps.

        Every rank of the pipeline calls this. Errors are raised on every rank.

        Args:
            microbatch: as the first layer takes it; not used if there is an error.
            error: what is wrong on this rank, None if nothing is.

        Returns:
            The signature before each virtual stage, followed by that after the last stage; and how
            often the ranks have agreed on these circumstances before.

        Raises:
            Exception: the error of any rank.
            ValueError: the ranks disagree on what must be the same, or as `shape_inference.infer`
                raises it.
            TypeError: as `shape_inference.infer` raises it.
        """
        common, number = {}, 0  # 0 stands for an error
        if error is None:
            common = self._common(microbatch)
            key = tuple(common.values()), self._local()
            number = self._numbers.setdefault(key, len(self._numbers) + 1)
        numbers = self._exchange(number)
        if numbers not in self._known:
            self._require_same(common, error)
            self._known[numbers] = self._try(microbatch), 0
        boundaries, steps = self._known[numbers]
        self._known[numbers] = boundaries, steps + 1
        return boundaries, steps

    def close(self) -> None:
        """Drop the group."""
        self.group = None

    def _common(self, microbatch):
        """Return, by name, what must be the same on all ranks that have it."""
        kinds = ["cpu"]
        if torch.accelerator.is_available():
            kinds.append(torch.accelerator.current_accelerator().type)
        autocast = {
            f"autocast on {kind}": torch.is_autocast_enabled(kind)
            and torch.get_autocast_dtype(kind)
            for kind in kinds
        }
        frozen = {
            f"requires_grad of {tied.name}": tied.parameter.requires_grad for tied in self.tied
        }
        return {
            "a micro-batch": StageSignature.of(microbatch),
            **autocast,
            **frozen,
            "the grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "the default dtype": torch.get_default_dtype(),
        }

    def _local(self):
        """Return what may differ between ranks: this rank's modes, parameters and buffers."""
        return tuple(
            (
                module.training,
                *(
                    (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
                    for tensor in chain(module._parameters.values(), module._buffers.values())
                    if tensor is not None
                ),
            )
            for stage in self.stages.values()
            for module in stage.layers.modules()
        )

    def _exchange(self, number):
        """Return the numbers of all ranks."""
        numbers = torch.zeros(self.ranks, dtype=torch.int64, device="cpu")
        numbers[self.rank] = number
        if self.ranks > 1:
            try:
                dist.all_reduce(numbers, group=self.group)
            except RuntimeError as error:
                if not CLOSED.search(str(error)):
                    raise
                raise RuntimeError(
                    "another rank has closed the pipeline, or ended, and takes no part in this "
                    f"step ({str(error).partition('. ')[0]})"
                ) from error
        return tuple(numbers.tolist())

    def _require_same(self, common, error):
        gathered = from_all_ranks((common, error and (type(error), str(error))), self.group)
        errors = {rank: error for rank, (_, error) in enumerate(gathered) if error}
        if errors:
            kind, text = errors[min(errors)]
            ranks = [str(rank) for rank, error in errors.items() if error == (kind, text)]
            where = f"rank {', '.join(ranks)} of the pipeline: " * (len(ranks) < self.ranks)
            raise kind(where + text)
        first = {}
        for rank, (values, _) in enumerate(gathered):
            for name, value in values.items():
                other, expected = first.setdefault(name, (rank, value))
                if value != expected:
                    raise ValueError(
                        f"the ranks of the pipeline disagree on what they were given: {name} is "
                        f"{expected} on its rank {other}, and {value} on its rank {rank}"
                    )

    def _try(self, microbatch):
        """Try each stage on its rank, which broadcasts the signature after it to all ranks."""
        with without_a_trace():  # torch's first imports here take seconds: on all ranks at once
            boundaries = [StageSignature.of(microbatch)]
        tensors = microbatch if isinstance(microbatch, tuple) else (microbatch,)
        for number, owner in enumerate(self.placement):
            message = [None]
            if owner == self.rank:
                try:
                    with self.sharded.shapes(number) if self.sharded else nullcontext():
                        message = [self._after(self.stages[number], boundaries[-1], tensors)]
                except Exception as error:  # raised on every rank, so that none stays waiting
                    message = [(type(error), str(error))]
            dist.broadcast_object_list(message, group=self.group, group_src=owner)
            after, tensors = message[0]
            if not isinstance(after, StageSignature):
                raise after(tensors)
            boundaries.append(after)
        return boundaries

    def _after(self, stage, boundary, tensors):
        where = stage.first, self.device
        if self.trial == "shapes":
            return shape_inference.infer(stage.layers, boundary, *where), None
        after, tensors = shape_inference.infer_data(stage.layers, boundary, tensors, *where)
        return after, [tensor.cpu() for tensor in tensors]
