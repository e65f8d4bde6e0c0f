"""Run any schedule on real ranks: its forwards, its backwards, and the messages that it implies.

A rank goes through its row of the schedule. It receives the message that an action needs, runs the
action, and sends the message that follows: `Pipeline.step` is that loop. No schedule mentions a
message; `schedules.Schedule` says which messages follow from it, and `schedules.check` why none can
block. The actions are implemented in `stage`, the messages in `channels`.

Source:
    Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism"
    (2019).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import nn

from naranhi.data_parallel import all_reduce_bucketed, broadcast_buffers
from naranhi.pipeline.channels import AGREEMENT, Receiver, Sender, carrier, new_groups
from naranhi.pipeline.microbatches import Microbatches
from naranhi.pipeline.partition import check_kinds, check_layers, cut
from naranhi.pipeline.signatures import StageSignatures
from naranhi.pipeline.stage import Stage
from naranhi.pipeline.tied_weights import TiedWeight, copies, tied_parameters
from naranhi.pipeline.weight_stash import WeightStash
from naranhi.schedules import Channel, Schedule, channels, check, check_versions, releases
from naranhi.tensor_parallel import clip_grad_norm_

if TYPE_CHECKING:
    from naranhi.measure import Recorder


def run(
    schedule: Schedule,
    layers: Iterable[nn.Module],
    loss_fn: Callable[..., torch.Tensor],
    inputs: torch.Tensor | tuple[torch.Tensor, ...],
    targets: torch.Tensor | tuple[torch.Tensor, ...] | None,
    count: float | list[float] | tuple[float, ...],
    *,
    balance: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    recorder: Recorder | None = None,
) -> torch.Tensor | None:
    """Make a `Pipeline` for one step, and return what its `step` returns.

    Every rank calls this. The arguments are those of `Pipeline` and of `Pipeline.step`.
    """
    with Pipeline(layers, schedule, loss_fn, balance=balance, group=group) as pipeline:
        return pipeline.step(inputs, targets, count, recorder)


class Pipeline:
    """A model cut into stages, of which this rank runs its own, and a schedule to train it by.

        with Pipeline(layers, schedules.gpipe(4, 8), loss_fn) as pipeline:
            optimizer = SGD(pipeline.parameters(), lr=0.1)
            pipeline.step(inputs, targets, count)
            optimizer.step()

    Make it on every rank of the world at the same time, each in its own pipeline (several pipelines
    may exist side by side), and close it. A rank that is in no pipeline calls
    `join_group_creation`. Errors are raised on every rank, before anything of the model is sent.

    Args:
        layers: the whole model, the same on every rank. Each layer takes one argument and returns
            one value: a tensor or a tuple of tensors. A rank keeps only its own layers. A parameter
            that is used on several ranks is *tied*: each has a copy, and each copy receives the sum
            of the gradients of all copies, so that the copies stay equal.
        schedule: as `naranhi.schedules` makes them, for as many ranks as the group has.
        loss_fn: `loss_fn(output, targets)` of a micro-batch, a scalar: the *sum* over its valid
            tokens (rows, ...).
        balance: the number of layers of each virtual stage; see `cut`.
        group: the process group, None for the default one.
        optimizer: for a schedule that updates weights within a step, a function that makes a torch
            optimizer from a list of parameters; each stage has its own.
        stash: see `weight_stash.WeightStash`. False gives wrong gradients.
        versions: the most versions of its weights that a stage may hold, or a list by virtual
            stage.
        timeout: the seconds after which a message that has not arrived is an error.
        replicas: where several pipelines share a batch (data parallelism), the process group of the
            ranks that have the same stages as this one; each step sums their gradients.
        overlap: how to run the forward and the backward of a pair (`schedules.Overlap`):
            `overlap(forward, backward)` calls both, without arguments, and returns what they
            return, such as `in_threads`. The messages of both are received before and sent after.
            None runs one after the other, each with its messages, as torch's runtime does.
        trial: how to find out what each stage returns, before a step in new circumstances: other
            shapes of a micro-batch; another autocast, grad mode, inference mode or default dtype;
            other modes (`train`, `eval`), or dtypes, shapes or `requires_grad` of parameters.
            Copies of the layers are tried, each stage on its rank: with "shapes" on tensors without
            values, with "data" on the first micro-batch. Choose "data" for layers that read values
            (`if` on a tensor, `.item()`, `.numpy()`, a mask as an index); it needs memory for the
            copies. A trial changes nothing in the layers. It may change what is outside them, such
            as a list that a hook appends to.

    Raises:
        ScheduleError: the schedule is not valid (see `schedules.check`), or a stage would hold more
            than `versions`.
        ValueError: the balance does not fit (see `cut`); the group has another size; ranks of a
            pipeline, or replicas, were given different schedules or balances; a backward is to be
            split on a layer that is not `autograd.splittable`; the schedule updates weights without
            an optimizer, with replicas, or with a parameter that two stages share; a layer has
            parameters without shapes, or sparse gradients; tied parameters or replicas are not
            equal, to the bit.

    Attributes:
        stages: {virtual stage: `Stage`} of this rank.
        tied: the parameters of this rank of which other ranks have copies.
    """

    group: dist.ProcessGroup
    rank: int
    schedule: Schedule
    device: torch.device
    replicas: dist.ProcessGroup | None
    last: int
    overlap: Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]] | None
    stages: dict[int, Stage]
    tied: list[TiedWeight]

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
    ) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.schedule, layers = dist.get_rank(self.group), schedule, list(layers)
        gpu = dist.get_backend(self.group) == "nccl"
        self.device = torch.device(*("cuda", torch.cuda.current_device()) if gpu else ("cpu",))
        self.replicas = replicas if replicas and dist.get_world_size(replicas) > 1 else None
        local = {
            "pipeline": tuple(dist.get_process_group_ranks(self.group)),
            "replicas": self.replicas and tuple(dist.get_process_group_ranks(self.replicas)),
            "number of replicas": self.replicas and dist.get_world_size(self.replicas),
            "place in the pipeline": self.rank,
            "micro-batches": schedule.microbatches,
            "layers": len(layers),
            "balance": balance and list(balance),
            "trial": trial,
            "schedule": hashlib.sha256(str(schedule).encode()).hexdigest(),
        }
        try:
            check(schedule)
            if len(schedule) != dist.get_world_size(self.group):
                raise ValueError(
                    f"a schedule of {len(schedule)} ranks on {dist.get_world_size(self.group)}"
                )
            if trial not in ("shapes", "data"):
                raise ValueError(f'trial is "shapes" or "data", not {trial!r}')
            parts = cut(
                layers, schedule.virtual_stages, balance, schedule.virtual_stages // len(schedule)
            )
            check_kinds(schedule, parts, optimizer, self.replicas)
            check_layers(layers)
            if versions is not None:
                check_versions(schedule, versions)
            tied = tied_parameters(parts, schedule.placement)
            self._messages = channels(schedule)
            purposes = [AGREEMENT, *self._messages, *dict.fromkeys(ranks for _, _, ranks in tied)]
            local["groups"] = [self._group_of(purpose) for purpose in purposes]
            local["copies"] = copies(parts, schedule.placement, self.rank, self.replicas)
        except ValueError as error:
            local["error"] = error
        groups = new_groups(local, timeout)
        self._ends, users = {}, []
        self._let_go = weakref.finalize(self, _let_go, users, groups)
        self._let_go.atexit = False  # at exit, the process and its groups end anyway

        self.last = len(parts) - 1
        self.stages = {
            stage: Stage(
                part, sum(map(len, parts[:stage])), loss_fn if stage == self.last else None
            )
            for stage, part in enumerate(parts)
            if schedule.placement[stage] == self.rank
        }
        self.overlap = overlap
        self._turns = _turns(schedule.units[self.rank], overlap is not None)
        self._releases = releases(schedule)[self.rank]
        if any(action.kind == "U" for action in schedule[self.rank]):
            for stage in self.stages.values():
                stage.weights = WeightStash(stage, optimizer, stash)
        self.tied = [
            TiedWeight(name, parameter, groups[self._group_of(ranks)])
            for name, parameter, ranks in tied
            if self.rank in ranks
        ]
        self._boundaries = StageSignatures(
            self.stages, schedule.placement, groups[self._group_of(AGREEMENT)], trial, self.tied
        )
        users += [self._boundaries, *self.tied]
        for channel in self._messages:
            if self.rank in channel[:2]:
                self._ends[channel] = self._end(channel, groups[self._group_of(channel)])
                users.append(self._ends[channel])

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
        return nn.ModuleList(self.stages.values()).parameters()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients to a norm of at most `max_norm`, and return the norm before.

        The norm is that of the gradients of all stages; see `tensor_parallel.clip_grad_norm_`.
        Every rank of the pipeline calls this, and of all pipelines whose ranks share layers, after
        `step` and before the optimizer's `step`.

        Args:
            max_norm: the largest norm allowed, above 0.
            norm_type: the exponent of the norm, above 0.

        Returns:
            The norm before scaling, a float on every rank.
        """
        later_copies = [tied.parameter for tied in self.tied if dist.get_rank(tied.group)]
        return clip_grad_norm_(
            nn.ModuleList(self.stages.values()),
            max_norm,
            norm_type,
            groups=[self.group],
            counted_elsewhere=later_copies,
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
        the loss is this pipeline's part of it, and buffers become those of the first replica. Under
        `no_grad` or `inference_mode` only the loss is computed.

        The errors below are raised on every rank of the pipeline, before anything of the batch is
        sent. A layer that returns something else than in its trial raises ValueError on its own
        rank only, and the other ranks lose their connection to that rank. After an error in the
        middle of a step the pipeline can only be closed.

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
            ValueError: the micro-batches do not divide the batch; a list of counts has another
                length; ranks were given different shapes or circumstances; a layer does not take
                what the previous one returns, or cannot be tried.
            TypeError: a layer returns anything but a tensor or a tuple of tensors.
            RuntimeError: with replicas, a parameter has a gradient of an earlier step, which would
                be summed again.
        """
        batch, takes, earlier = self._agree(inputs, targets, count)
        for channel, end in self._ends.items():
            end.carrier = carrier(self.device, earlier)
            if isinstance(end, Receiver):
                end.expect(
                    [
                        takes[max(message[:2])].message(channel.kind)
                        for message in self._messages[channel]
                    ]
                )
        tied = self.tied if torch.is_grad_enabled() else ()
        for part in (*self.stages.values(), *tied):
            part.begin()
        local = {}  # messages between two stages of this rank

        def take(message):
            if message is None:
                return None
            channel = self.schedule.channel(message)
            return self._ends[channel].take() if channel else local.pop(message)

        def give(message, tensors):
            channel = self.schedule.channel(message)
            if channel:
                self._ends[channel].send(tensors)
            else:
                local[message] = tensors

        def run(stage, action, arrived, released):
            number, kind, k, version = action
            if kind == "F":
                return stage.run_forward(
                    k,
                    batch.inputs[k] if number == 0 else arrived,
                    takes[number],
                    takes[number + 1],
                    batch.target(k) if number == self.last else None,
                    batch.counts[k],
                    version,
                )
            if kind == "B":
                return stage.run_backward(k, arrived)
            if kind == "I":
                return stage.run_input_grad(k, arrived)
            if kind == "W":
                return stage.run_weight_grad(k)
            return stage.weights.update(version, last_use=released == (number, version - 1))

        def do(position, action, arrived):
            stage, released = self.stages[action.stage], self._releases.get(position)
            result = run(stage, action, arrived, released)
            if released:
                stage.weights.release(released[1])
            return result

        for turn in self._turns:  # one action, or the two of a pair
            calls = [
                partial(do, position, action, take(self.schedule.needs(action)))
                for position, action in turn
            ]
            if recorder:
                recorder.begin()
            results = self.overlap(*calls) if len(calls) == 2 else [calls[0]()]
            if recorder:
                for _, action in turn:
                    recorder.end(action)
            for (_, action), result in zip(turn, results, strict=True):
                message = self.schedule.gives(action)
                if message:
                    give(message, result)
            del calls, results, result  # otherwise they would live until the next turn is over

        for end in self._ends.values():
            end.flush()
        if self.replicas:
            model = nn.ModuleList(self.stages.values())
            all_reduce_bucketed(model, self.replicas)
            broadcast_buffers(model, self.replicas)
        for parameter in tied:  # last: copies are equal, whatever order replicas were summed in
            parameter.sum()
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
            if (
                self.replicas
                and torch.is_grad_enabled()
                and any(param.grad is not None for param in self.parameters())
            ):
                raise RuntimeError(
                    "a parameter still has a gradient of an earlier step, and that is a sum over "
                    "the replicas already: call zero_grad() first"
                )
        except Exception as reason:  # agree() raises it on every rank
            error = reason
        return batch, *self._boundaries.agree(first, error)

    def _group_of(self, purpose):
        """Return the key of a purpose's process group: its ranks in the world, and the purpose.

        A purpose is AGREEMENT, a Channel, or the ranks that share a parameter.
        """
        ranks = (
            range(len(self.schedule))
            if purpose == AGREEMENT
            else purpose[:2]
            if isinstance(purpose, Channel)
            else purpose
        )
        return tuple(sorted(dist.get_global_rank(self.group, rank) for rank in ranks)), purpose

    def _end(self, channel, group):
        """Return this rank's end of a channel: a Sender or a Receiver."""
        sends = self.rank == channel.from_rank
        peer = dist.get_global_rank(self.group, channel.to_rank if sends else channel.from_rank)
        return (Sender if sends else Receiver)(group, peer, self.device)


def _turns(units, overlap):
    """Return what a rank runs in turn, each a list of (position in the row, action).

    The two actions of a pair are one turn if they overlap, otherwise two.
    """
    row = enumerate(chain.from_iterable(units))
    pairs = [list(islice(row, len(unit))) for unit in units]
    return pairs if overlap else [[numbered] for pair in pairs for numbered in pair]


def _let_go(users, groups):
    """Close the groups of a Pipeline, and make their users drop them.

    Gloo closes a connection once nothing refers to its group or its works, which is how the peers
    learn of a failure.
    """
    for group in groups.values():
        if group in dist.distributed_c10d._world.pg_map:  # not destroyed with all others yet
            dist.destroy_process_group(group)
    groups.clear()
    for user in users:
        user.close()


def join_group_creation() -> None:
    """Take part in the creation of process groups, on a rank of the world that is in no pipeline.

    Such a rank calls this while the others make their pipelines, because torch creates process
    groups on all ranks at once. On a mesh (`distributed.Mesh`) no rank calls this: each is in a
    pipeline, and all make theirs by the one line `Pipeline(..., mesh.pipeline)`.
    """
    new_groups({}, 60.0)
