"""Run any schedule on real ranks: its forwards, its backwards, and the messages that it implies.

A rank goes through its row of the schedule (`row.Row`). It receives the message that an action
needs, runs the action (`stage`), and sends the message that follows (`messages`). No schedule
mentions messages; `schedules.check` says why none can block. Source: Huang et al., "GPipe" (2019).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn

from naranhi.data_parallel import broadcast_buffers
from naranhi.distributed import device_of
from naranhi.expert_parallel import expert_parameters
from naranhi.pipeline.gradient_sums import sum_gradients
from naranhi.pipeline.groups import AGREEMENT, key_of, let_go, new_groups
from naranhi.pipeline.messages import Messages
from naranhi.pipeline.microbatches import Microbatches
from naranhi.pipeline.preparation import prepared, refuse_gradients
from naranhi.pipeline.row import Row
from naranhi.pipeline.sharding import sharded_stages
from naranhi.pipeline.signatures import StageSignatures
from naranhi.pipeline.stage import Stage
from naranhi.pipeline.tied_weights import TiedWeight
from naranhi.pipeline.weight_stash import WeightStash
from naranhi.schedules import Schedule
from naranhi.tensor_parallel import clip_grad_norm_

if TYPE_CHECKING:
    from naranhi.measure import Recorder
    from naranhi.pipeline.sharding import ShardedStages, Sharding


class Pipeline:
    """A model cut into stages, of which this rank runs its own, and a schedule to train it by.

        with Pipeline(layers, schedules.gpipe(4, 8), loss_fn) as pipeline:
            optimizer = SGD(pipeline.parameters(), lr=0.1)
            pipeline.step(inputs, targets, count)
            optimizer.step()

    Create it on every rank of the world at the same time, each in its own pipeline (several may
    exist side by side), and close it at the end. A rank that is in no pipeline calls
    `join_group_creation`. Errors are raised on every rank, before anything of the model is sent.

    Args:
        layers: the whole model, the same on every rank; layers of other ranks may be on the meta
            device. Each takes one argument and returns one value: a tensor or a tuple of tensors. A
            rank keeps only its own. A parameter that is used on several ranks is *tied*: each has a
            copy, and each receives the sum of all copies' gradients, so that they stay equal. Each
            layer that uses it must have it as a registered parameter.
        schedule: a schedule of `naranhi.schedules`, for as many ranks as the group has.
        loss_fn: `loss_fn(output, targets)` of a micro-batch, a scalar: the *sum* over its valid
            tokens (rows, ...). Weights of earlier stages that it reads get no gradient from it.
        balance: the number of layers of each virtual stage; see `cut`.
        group: the process group, None for the default one.
        optimizer: for a schedule that updates weights within a step, a function that makes a torch
            optimizer from a list of parameters; each stage has its own. Before an update, gradients
            that the ranks of a tensor group have in part are summed.
        stash: see `weight_stash.WeightStash`. False gives wrong gradients.
        versions: the most versions of its weights that a stage may hold, or a list by virtual
            stage.
        timeout: the seconds after which a message that has not arrived is an error.
        replicas: where several pipelines share a batch (data parallelism) or its sequences, the
            process group of the ranks that have the same stages as this one; each step sums their
            gradients, and those of experts over the replicas of their layer (`MoE`).
        sharding: for a schedule that gathers and reduces stages (`schedules.with_sharding`), what
            shards them over the replicas, such as `zero.ZeroStages`; see `sharded`.
        overlap: how to run the forward and the backward of a pair (`schedules.Overlap`):
            `overlap(forward, backward)` calls both, without arguments, and returns what they
            return, such as `in_threads`. The messages of both are received before and sent after.
            None runs one after the other, each with its messages, as torch's runtime does.
        trial: how to find out what each stage returns, before a step in new circumstances: other
            shapes of a micro-batch; another autocast, grad mode, inference mode or default dtype;
            other modes (`train`, `eval`), or dtypes, shapes or `requires_grad` of parameters.
            Copies of the layers are tried, each stage on its rank: with "shapes" on tensors without
            values, with "data" on the first micro-batch. Choose "data" for layers that read values
            (`if` on a tensor, `.item()`, a mask as an index); it needs memory for the copies. A
            trial changes nothing in the layers, but may change a list that a hook appends to.

    Raises:
        ScheduleError: the schedule is not valid (see `schedules.check`), or a stage would hold more
            than `versions`.
        ValueError: the balance does not fit (see `cut`); the group has another size; ranks of a
            pipeline, or replicas, were given different schedules or balances; a backward is to be
            split on a layer that is not `autograd.splittable`; the schedule updates weights without
            an optimizer, with replicas, or with a parameter that two stages share; a layer cannot
            be run (see `partition.check_layers`); tied parameters or replicas are not equal, to the
            bit, or would not stay so (`tied_weights.check_max_norm`); the schedule gathers or
            reduces stages without `sharding` or replicas, or with a parameter of two stages.

    Attributes:
        stages: {virtual stage: `Stage`} of this rank.
        tied: this rank's `TiedWeight`s, the parameters of which other ranks have copies.
        sharded: what `sharding` has returned: the shards of this rank, for an optimizer; or None.
    """

    group: dist.ProcessGroup
    rank: int
    schedule: Schedule
    device: torch.device
    replicas: dist.ProcessGroup | None
    last: int
    stages: dict[int, Stage]
    tied: list[TiedWeight]
    sharded: ShardedStages | None

    def __init__(
        self,
        layers: Iterable[nn.Module],
        schedule: Schedule,
        loss_fn: Callable[..., torch.Tensor],
        *,
        balance: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        stash: bool = True,
        versions: int | Sequence[int] | None = None,
        timeout: float = 60.0,
        replicas: dist.ProcessGroup | None = None,
        overlap: Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]] | None = None,
        trial: str = "shapes",
        sharding: Sharding | None = None,
    ) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.schedule = dist.get_rank(self.group), schedule
        self.device = device_of(self.group)
        self.replicas = replicas if replicas and dist.get_world_size(replicas) > 1 else None
        local, parts, tied = prepared(
            layers,
            schedule,
            loss_fn,
            self.group,
            balance=balance,
            optimizer=optimizer,
            versions=versions,
            replicas=replicas,
            sharding=sharding,
            trial=trial,
        )
        groups, users = new_groups(local, timeout), []
        self._let_go = weakref.finalize(self, let_go, users, groups)
        self._let_go.atexit = False  # at exit, the process and its groups end anyway

        self.last, self._midway = len(parts) - 1, False
        self.stages = {
            stage: Stage(
                part, sum(map(len, parts[:stage])), loss_fn if stage == self.last else None
            )
            for stage, part in enumerate(parts)
            if schedule.placement[stage] == self.rank
        }
        self._model = nn.ModuleList(self.stages.values())
        self._experts = expert_parameters(self._model)
        if any(action.kind == "U" for action in schedule[self.rank]):
            for stage in self.stages.values():
                stage.weights = WeightStash(stage, optimizer, stash)
        self.tied = [
            TiedWeight(name, parameter, groups[key_of(ranks, self.group)])
            for name, parameter, ranks in tied
            if self.rank in ranks
        ]
        self.sharded = sharded_stages(sharding, self.stages, schedule, replicas, self.group)
        agreement = groups[key_of(AGREEMENT, self.group)]
        self._boundaries = StageSignatures(
            self.stages, schedule.placement, agreement, trial, self.tied, self.sharded, self.device
        )
        users += [self._boundaries, *self.tied]
        self._messages = Messages(schedule, self.group, groups, self.device)
        users.append(self._messages)
        self._row = Row(schedule, self.rank, self.stages, self._messages, overlap, self.sharded)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channels and groups, once every rank is done with them.

        A `Pipeline` that nothing refers to any more is closed too.
        """
        self._let_go()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters, each once, for an optimizer."""
        return self._model.parameters()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients to a norm of at most `max_norm`, and return the norm before.

        The norm is that of all stages; errors are those of `tensor_parallel.clip_grad_norm_`. Every
        rank of all pipelines calls this, between `step` and the optimizer's `step`.

        Args:
            max_norm: the largest norm allowed, above 0.
            norm_type: the exponent of the norm, above 0; inf for the largest absolute value.

        Returns:
            The norm before scaling, a float on every rank.
        """
        if self.sharded:
            return self.sharded.clip_grad_norm_(max_norm, norm_type, [self.group])
        later_copies = [tied.parameter for tied in self.tied if dist.get_rank(tied.group)]
        return clip_grad_norm_(
            self._model, max_norm, norm_type, groups=[self.group], counted_elsewhere=later_copies
        )

    def step(
        self,
        inputs: torch.Tensor | tuple[torch.Tensor, ...],
        targets: torch.Tensor | tuple[torch.Tensor, ...] | None,
        count: float | list[float] | tuple[float, ...],
        recorder: Recorder | None = None,
    ) -> torch.Tensor | None:
        """Run every action of the schedule on one batch, and return the loss.

        The gradients are added to `.grad`. With replicas, gradients are those of the whole batch,
        the loss is this pipeline's part, and buffers become those of the first replica. Under
        `no_grad` or `inference_mode` only the loss is computed.

        The errors below are raised on every rank of the pipeline, before anything of the batch is
        sent. What goes wrong later (a layer returns something else than in its trial, or only some
        replicas have a gradient) raises on its rank or stage only, and the others of its pipeline
        lose their connection to it; replicas in other pipelines wait until their group's timeout.
        After an error midway in a step the pipeline can only be closed.

        Args:
            inputs: on every rank, a tensor or tuple of tensors whose first dimension is the batch,
                or this pipeline's share of it. Only the first stage reads their values; the other
                ranks use shapes and dtypes.
            targets: a tensor or tuple of tensors, divided as `inputs`. Only the last stage needs
                them; other ranks may pass None.
            count: what the summed loss is divided by: how many tokens (rows, ...) are valid in the
                whole step, that is in all micro-batches, and in all pipelines side by side. The
                mean of the micro-batches' means would be another loss if their padding differs.
                With 0, loss and gradients are NaN (0 / 0). For a schedule that updates weights
                within a step: how many are valid in all micro-batches of an update; a list by
                micro-batch where updates differ.
            recorder: records when each action ran.

        Returns:
            The loss, a scalar tensor, on the rank of the last stage; None on the other ranks.

        Raises:
            ValueError: the micro-batches do not divide the batch; a tensor of it requires a
                gradient; a list of counts has another length; ranks were given different shapes or
                circumstances; a layer does not take what the previous one returns, or cannot be
                tried.
            TypeError: inputs, targets or what a layer returns are not tensors or tuples of tensors.
            RuntimeError: with replicas or copies of experts, a parameter has a gradient already;
                one was replaced; stages are gathered; a step failed; or a rank closed the pipeline.
        """
        batch, takes, earlier = self._agree(inputs, targets, count)
        self._midway = True
        tied = self.tied if torch.is_grad_enabled() else ()
        for part in (*self.stages.values(), *tied):
            part.begin()
        self._messages.expect(takes, earlier)
        self._row.run(batch, takes, recorder)
        self._messages.flush()
        if torch.is_grad_enabled():  # otherwise gradients are an earlier step's, summed already
            sum_gradients(self._model, self.replicas, self.sharded, bool(self._experts))
        if self.replicas:
            broadcast_buffers(self._model, self.replicas)
        for parameter in tied:  # last: copies are equal, whatever order replicas were summed in
            parameter.sum()
        self._midway = False
        return self.stages[self.last].total if self.last in self.stages else None

    def _agree(self, inputs, targets, count):
        """Return the micro-batches, each stage's signature, and the number of earlier such steps.

        Raise on every rank if anything is wrong on any rank.
        """
        if not self._let_go.alive:
            raise RuntimeError("this Pipeline is closed: make a new one")
        batch = first = error = None
        try:
            batch = Microbatches(
                inputs, targets, count, self.schedule.microbatches, self.last in self.stages
            )
            first = batch.first()
            if self._midway:
                raise RuntimeError("an earlier step has failed midway: close this Pipeline")
            if self.sharded:
                self.sharded.begin()
            for stage in self.stages.values():
                stage.require_same_parameters()
            refuse_gradients(self.parameters(), self.replicas or any(self._experts.values()))
        except Exception as reason:  # agree() raises it on every rank
            error = reason
        return batch, *self._boundaries.agree(first, error)
