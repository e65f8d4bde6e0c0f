"""What each stage of a pipeline takes in the circumstances of a step, agreed on by all ranks.

What a layer returns depends on more than its input: on autocast, the grad mode, training or
evaluation, which parameters are frozen. Each rank numbers the circumstances that it meets. Before a
step the ranks exchange these numbers. If their combination is new, the stages are tried in turn; if
it is known, the ranks know what will be sent.
"""

from itertools import chain

import torch
import torch.distributed as dist

from naranhi.pipeline import shape_inference
from naranhi.pipeline.dry_run import without_a_trace
from naranhi.pipeline.shape_inference import StageSignature


class StageSignatures:
    """The `StageSignature` before each stage, and after the last, by the circumstances of a step.

    stages: {virtual stage: Stage} of this rank. placement: by virtual stage, its rank. group: all
    ranks of the pipeline, to agree by messages between CPUs. trial: "shapes" or "data". tied: this
    rank's `TiedWeight` parameters.
    """

    def __init__(self, stages, placement, group, trial, tied=()):
        self.stages, self.placement, self.group, self.trial = stages, placement, group, trial
        self.tied = tied
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._numbers, self._known = {}, {}

    def agree(self, microbatch, error=None):
        """Return the boundary before each virtual stage, the last one after the last stage; and how
        often the ranks have agreed on these circumstances before.

        Every rank of the pipeline calls this. microbatch: as the first layer takes it. error: what
        is wrong on this rank, if anything.

        Raises, on every rank: the error of any rank; ValueError if the ranks disagree on what must
        be the same; TypeError and ValueError as `shape_inference.infer` does.
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

    def close(self):
        """Let go of the group."""
        self.group = None

    def _common(self, microbatch):
        """What must be the same on all ranks that have it, by name."""
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
        """What may differ between ranks: modes, parameters and buffers of this rank's stages."""
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
        """The numbers of all ranks."""
        numbers = torch.zeros(self.ranks, dtype=torch.int64, device="cpu")
        numbers[self.rank] = number
        if self.ranks > 1:
            dist.all_reduce(numbers, group=self.group)
        return tuple(numbers.tolist())

    def _require_same(self, common, error):
        gathered = [None] * self.ranks
        dist.all_gather_object(
            gathered, (common, error and (type(error), str(error))), group=self.group
        )
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
        """Try each stage on the rank that has it, which tells all ranks the boundary after it."""
        with without_a_trace():  # the first time, torch imports for seconds: on all ranks at once
            boundaries = [StageSignature.of(microbatch)]
        tensors = microbatch if isinstance(microbatch, tuple) else (microbatch,)
        for number, owner in enumerate(self.placement):
            message = [None]
            if owner == self.rank:
                try:
                    message = [self._after(self.stages[number], boundaries[-1], tensors)]
                except Exception as error:  # raised on every rank, so that none goes on and waits
                    message = [(type(error), str(error))]
            dist.broadcast_object_list(message, group=self.group, group_src=owner)
            after, tensors = message[0]
            if not isinstance(after, StageSignature):
                raise after(tensors)
            boundaries.append(after)
        return boundaries

    def _after(self, stage, boundary, tensors):
        if self.trial == "shapes":
            return shape_inference.infer(stage.layers, boundary, stage.first), None
        after, tensors = shape_inference.infer_data(stage.layers, boundary, tensors, stage.first)
        return after, [tensor.cpu() for tensor in tensors]
