"""Pipelines: run any schedule on real ranks, forwards and backwards, with the messages it implies.

A rank goes through its row of the schedule. It takes the message that an action needs, does the
action, and gives the message that follows: `Pipeline.step` is that loop. No schedule mentions a
message; `schedules.Schedule` says which there are, and `schedules.check` why none can block. What
an action does is in `stage`, how a message travels in `channels`.

Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline
parallelism" (2019).
"""

import hashlib
import weakref

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
from naranhi.schedules import Channel, channels, check, check_versions, releases
from naranhi.tensor_parallel import clip_grad_norm_


def run(schedule, layers, loss, inputs, targets, count, balance=None, group=None, recorder=None):
    """One step of a `Pipeline` that is made for it, on every rank: what its `step` returns."""
    with Pipeline(layers, schedule, loss, balance, group) as pipeline:
        return pipeline.step(inputs, targets, count, recorder)


class Pipeline:
    """A model cut into stages, of which this rank has its own, and a schedule to train it by.

        with Pipeline(layers, schedules.gpipe(4, 8), loss) as pipeline:
            optimizer = SGD(pipeline.parameters(), lr=0.1)
            pipeline.step(inputs, targets, count)
            optimizer.step()

    layers: the whole model, a list of modules, the same on every rank. Each takes one argument and
        returns one value: a tensor or a tuple of tensors. Only this rank's are kept. A parameter
        that is used on several ranks is *tied*: each has a copy, and each copy receives the sum of
        their gradients, so that they stay the same.
    schedule: as `naranhi.schedules` makes them, for as many ranks as the group has.
    loss: `loss(output, targets)` of a micro-batch, a scalar: the *sum* over what is valid in it.
    balance: the number of layers of each virtual stage; see `cut`.
    group: the process group, None for the default one.
    replicas: where several pipelines share a batch (data parallelism), the process group of the
        ranks that have the same stages as this one; each step adds up their gradients.
    optimizer: for a schedule that updates weights on its way, a function that makes a torch
        optimizer of a list of parameters; each stage has its own.
    stash: see `weight_stash.WeightStash`. False gives wrong gradients.
    versions: the most versions of its weights that a stage may hold, or a list by virtual stage.
    timeout: after how many seconds a message that does not come is an error.
    trial: how to find out what each stage returns, before a step whose circumstances are new: other
        shapes of a micro-batch; another autocast, grad mode, inference mode or default dtype; other
        modes (`train`, `eval`), or dtypes, shapes or `requires_grad` of parameters. Copies of the
        layers are tried, each stage on its rank: on "shapes", that is on tensors without values, or
        on "data", the first micro-batch. Choose "data" for layers that look at values (`if` on a
        tensor, `.item()`, `.numpy()`, a mask as an index); it needs the memory of the copies. A
        trial changes nothing in the layers. What is outside of them it may change, such as a list
        that a hook appends to.

    Make it on every rank of the world at the same time, each in its own pipeline (several may stand
    side by side), and close it; a rank that is in none calls `join_group_creation`. Raises, on
    every rank and before anything of the model is sent: ScheduleError as `schedules.check` does,
    and where a stage would hold more `versions`; ValueError for a balance that does not fit (see
    `cut`), for a group of another size, for ranks of a pipeline, or replicas, that were given
    different schedules or balances, for a backward to be split on a layer that is not
    `autograd.splittable`, for updates without an optimizer, with replicas, or with a parameter that
    two stages share; for a layer without shapes or with sparse gradients; for tied parameters or
    replicas that are not equal, to the bit.

    Attributes: `stages`, {virtual stage: Stage} of this rank.
    """

    def __init__(
        self,
        layers,
        schedule,
        loss,
        balance=None,
        group=None,
        optimizer=None,
        stash=True,
        versions=None,
        timeout=60.0,
        replicas=None,
        trial="shapes",
    ):
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.schedule, layers = dist.get_rank(self.group), schedule, list(layers)
        gpu = dist.get_backend(self.group) == "nccl"
        self.device = torch.device(*("cuda", torch.cuda.current_device()) if gpu else ("cpu",))
        self.replicas = replicas if replicas and dist.get_world_size(replicas) > 1 else None
        mine = {
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
            mine["groups"] = [self._group_of(purpose) for purpose in purposes]
            mine["copies"] = copies(parts, schedule.placement, self.rank, self.replicas)
        except ValueError as error:
            mine["error"] = error
        groups = new_groups(mine, timeout)
        self._ends, users = {}, []
        self._let_go = weakref.finalize(self, _let_go, users, groups)
        self._let_go.atexit = False  # the process ends then, and all of this with it

        self.last = len(parts) - 1
        self.stages = {
            stage: Stage(part, sum(map(len, parts[:stage])), loss if stage == self.last else None)
            for stage, part in enumerate(parts)
            if schedule.placement[stage] == self.rank
        }
        self._releases = releases(schedule)[self.rank]
        if any(action.kind == "U" for action in schedule[self.rank]):
            for stage in self.stages.values():
                stage.weights = WeightStash(stage, optimizer, stash)
        self._tied = [
            TiedWeight(name, parameter, groups[self._group_of(ranks)])
            for name, parameter, ranks in tied
            if self.rank in ranks
        ]
        self._boundaries = StageSignatures(
            self.stages, schedule.placement, groups[self._group_of(AGREEMENT)], trial, self._tied
        )
        users += [self._boundaries, *self._tied]
        for channel in self._messages:
            if self.rank in channel[:2]:
                self._ends[channel] = self._end(channel, groups[self._group_of(channel)])
                users.append(self._ends[channel])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """Close the channels and groups, when every rank is done with them.

        A Pipeline that nobody refers to any more is closed too.
        """
        self._let_go()

    def parameters(self):
        """This rank's parameters, each once, to be given to an optimizer."""
        return nn.ModuleList(self.stages.values()).parameters()

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients to a norm of at most `max_norm`, and return the norm they had, a
        float on every rank: that of all stages' gradients, see `tensor_parallel.clip_grad_norm_`.

        Every rank of the pipeline calls this, and of all pipelines whose ranks share layers, after
        `step` and before the optimizer's.
        """
        later_copies = [tied.parameter for tied in self._tied if dist.get_rank(tied.group)]
        return clip_grad_norm_(
            nn.ModuleList(self.stages.values()),
            max_norm,
            norm_type,
            groups=[self.group],
            counted_elsewhere=later_copies,
        )

    def step(self, inputs, targets, count, recorder=None):
        """Every action of the schedule, on one batch. Adds the gradients to `.grad`, and returns
        the loss, a scalar tensor, on the rank of the last stage, and None on the others. Beside
        replicas, gradients are those of the whole batch, the loss is this pipeline's part of it,
        and buffers become those of the first replica. Under `no_grad` or `inference_mode` only the
        loss is computed.

        inputs: on every rank, a tensor or tuple of tensors whose first dimension is the batch, or
            this pipeline's share of it. Only the first stage reads them; the other ranks look at
            shapes and dtypes.
        targets: likewise. Only the last stage needs them; other ranks may give None.
        count: what the summed loss is divided by: how many tokens (rows, ...) are valid in the
            whole step, that is in all micro-batches, and in all pipelines side by side. The mean of
            micro-batches' means would be another loss when their padding differs. With 0, loss
            and gradients are no numbers (0 / 0). For a schedule that updates weights on its way:
            in all micro-batches of an update; a list of numbers, by micro-batch, where these
            differ.
        recorder: a `measure.Recorder`, to take down when each action ran.

        Raises, on every rank of the pipeline and before anything of the batch is sent: ValueError
        when the micro-batches do not divide the batch, for a list of counts of another length, for
        ranks that were given different shapes or circumstances, and for a layer that does not take
        what the one before it returns or cannot be tried; TypeError for a layer that returns
        anything but a tensor or a tuple of tensors; beside replicas RuntimeError for a gradient of
        an earlier step, which would be added up again. A layer that returns something else than in
        its trial is a ValueError on its rank, and the others lose their connection to it. After an
        error in the midst of a step the pipeline can only be closed.
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
        tied = self._tied if torch.is_grad_enabled() else ()
        for part in (*self.stages.values(), *tied):
            part.begin()
        here = {}  # messages between two stages of this rank

        def take(message):
            if message is None:
                return None
            channel = self.schedule.channel(message)
            return self._ends[channel].take() if channel else here.pop(message)

        def give(message, tensors):
            channel = self.schedule.channel(message)
            if channel:
                self._ends[channel].send(tensors)
            else:
                here[message] = tensors

        def do(stage, action, arrived, released):
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

        for position, action in enumerate(self.schedule[self.rank]):
            stage, released = self.stages[action.stage], self._releases.get(position)
            arrived = take(self.schedule.needs(action))
            if recorder:
                recorder.begin()
            result = do(stage, action, arrived, released)
            if released:
                stage.weights.release(released[1])
            if recorder:
                recorder.end(action)
            message = self.schedule.gives(action)
            if message:
                give(message, result)
            del arrived, result  # or they would live as long as the next action takes

        for end in self._ends.values():
            end.flush()
        if self.replicas:
            model = nn.ModuleList(self.stages.values())
            all_reduce_bucketed(model, self.replicas)
            broadcast_buffers(model, self.replicas)
        for parameter in tied:  # last: whatever order replicas were added up in, copies are equal
            parameter.sum()
        return self.stages[self.last].total if self.last in self.stages else None

    def _agree(self, inputs, targets, count):
        """The micro-batches, what each stage takes, and how many such steps there have been: when
        nothing is wrong on any rank."""
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
        """Which process group serves AGREEMENT, a Channel, or the ranks that share a parameter: its
        ranks in the world, and the purpose."""
        ranks = (
            range(len(self.schedule))
            if purpose == AGREEMENT
            else purpose[:2]
            if isinstance(purpose, Channel)
            else purpose
        )
        return tuple(sorted(dist.get_global_rank(self.group, rank) for rank in ranks)), purpose

    def _end(self, channel, group):
        """This rank's end of a channel: a Sender or a Receiver."""
        sends = self.rank == channel.from_rank
        peer = dist.get_global_rank(self.group, channel.to_rank if sends else channel.from_rank)
        return (Sender if sends else Receiver)(group, peer, self.device)


def _let_go(users, groups):
    """Close the groups of a Pipeline, and make their users let go of them.

    Gloo closes a connection when nothing refers to its group or its works any more, and that is how
    the peers learn of a failure.
    """
    for group in groups.values():
        if group in dist.distributed_c10d._world.pg_map:  # not destroyed with all others
            dist.destroy_process_group(group)
    groups.clear()
    for user in users:
        user.close()


def join_group_creation():
    """What a rank of the world that is in no pipeline calls while others make theirs.

    Torch makes process groups on all ranks at once. On a mesh (`mesh.Mesh`) no rank calls this:
    each is in a pipeline, and all make theirs by the one line `Pipeline(..., mesh.pipeline)`.
    """
    new_groups({}, 60.0)
