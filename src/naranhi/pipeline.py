"""Pipelines: run any schedule on real ranks, forwards and backwards, with the messages it implies.

A rank goes through its row of the schedule. It takes the message that an action needs, does the
action, and gives the message that follows: `Pipeline.step` is that loop. No schedule mentions a
message; `naranhi.actions` says which there are, and `schedules.check` why none can block. What an
action does is in `naranhi.stage`, how a message travels in `naranhi.messages`.

Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline
parallelism" (2019).
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from naranhi import shapes
from naranhi.cutting import check_kinds, cut
from naranhi.data_parallel import sum_in_buckets
from naranhi.messages import Receiver, Sender, meet
from naranhi.schedules import Channel, channels, check, check_versions
from naranhi.stage import Stage
from naranhi.stashed import Stashed
from naranhi.tied import Tied, tied_parameters
from naranhi.weight_versions import releases


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
    stash: see `stashed.Stashed`. False gives wrong gradients.
    versions: the most versions of its weights that a stage may hold, or a list by virtual stage.
    timeout: after how many seconds a message that does not come is an error.

    Make it on every rank of the world at the same time, each in its own pipeline (several may stand
    side by side), and close it; a rank that is in none calls `stand_aside`. Raises, on every rank
    and before anything of the model is sent: ScheduleError as `schedules.check` does, and where a
    stage would hold more `versions`; ValueError for a balance that does not fit (see `cut`), for a
    group of another size, for ranks of a pipeline, or replicas, that were given different schedules
    or balances, for a backward to be split on a layer that is not `split_backward.splittable`, for
    updates without an optimizer, with replicas, or with a parameter that two stages share.

    Attributes: `stages`, {virtual stage: Stage} of this rank.
    """

    def __init__(self, layers, schedule, loss, balance=None, group=None, optimizer=None, stash=True,
                 versions=None, timeout=60.0, replicas=None):
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.schedule, layers = dist.get_rank(self.group), schedule, list(layers)
        self.replicas = replicas if replicas and dist.get_world_size(replicas) > 1 else None
        mine = {
            "pipeline": tuple(dist.get_process_group_ranks(self.group)),
            "replicas": self.replicas and tuple(dist.get_process_group_ranks(self.replicas)),
            "number of replicas": self.replicas and dist.get_world_size(self.replicas),
            "place in the pipeline": self.rank, "micro-batches": schedule.microbatches,
            "layers": len(layers), "balance": balance and list(balance),
            "schedule": hashlib.sha256(str(schedule).encode()).hexdigest()}
        try:
            check(schedule)
            if len(schedule) != dist.get_world_size(self.group):
                raise ValueError(f"a schedule of {len(schedule)} ranks on "
                                 f"{dist.get_world_size(self.group)}")
            parts = cut(layers, schedule.virtual_stages, balance,
                        schedule.virtual_stages // len(schedule))
            tied = tied_parameters(parts, schedule.placement)
            check_kinds(schedule, parts, optimizer, self.replicas)
            if versions is not None:
                check_versions(schedule, versions)
            self._messages = channels(schedule)
            purposes = [*self._messages, *dict.fromkeys(ranks for _, ranks in tied)]
            mine["groups"] = [self._group_of(purpose) for purpose in purposes]
        except ValueError as error:
            mine["error"] = error
        self._groups = meet(mine, timeout)

        self.last = len(parts) - 1
        self.stages = {
            stage: Stage(part, sum(map(len, parts[:stage])), loss if stage == self.last else None)
            for stage, part in enumerate(parts) if schedule.placement[stage] == self.rank}
        self._releases = releases(schedule)[self.rank]
        if any(action.kind == "U" for action in schedule[self.rank]):
            for stage in self.stages.values():
                stage.weights = Stashed(stage, optimizer, stash)
        self._boundaries = {}  # by that of a micro-batch: what each stage takes, the last included
        self._ends = self._open_channels()
        self._tied = [Tied(parameter, self._groups[self._group_of(ranks)])
                      for parameter, ranks in tied if self.rank in ranks]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """Close the channels, when every rank is done with them."""
        for end in self._ends.values():
            end.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._ends, self._groups = {}, {}

    def parameters(self):
        """This rank's parameters, each once, to be given to an optimizer."""
        return nn.ModuleList(self.stages.values()).parameters()

    def step(self, inputs, targets, count, recorder=None):
        """Every action of the schedule, on one batch. Adds the gradients to `.grad`, and returns
        the loss, a scalar tensor, on the rank of the last stage, and None on the others. Beside
        replicas, gradients are those of the whole batch, the loss is this pipeline's part of it.

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
        recorder: a `timeline.Recorder`, to take down when each action ran.

        Raises, before anything of the batch is sent, ValueError when the micro-batches do not
        divide the batch, for a list of counts of another length and for a layer that does not take
        what the one before it returns; and TypeError for a layer that returns anything but a tensor
        or a tuple of tensors; beside replicas RuntimeError for a gradient of an earlier step, which
        would be added up again. Layers are tried on shapes alone, once for each shape of a
        micro-batch; later only the rank of the last stage sees that targets do not fit, and the
        others wait for it until the `timeout`. After an error in the midst of a step the pipeline
        can only be closed.
        """
        inputs, rebuild = self._split("inputs", inputs)
        counts = count if isinstance(count, (list, tuple)) else [count] * len(inputs)
        if len(counts) != len(inputs):
            raise ValueError(f"count: {len(counts)} numbers for {len(inputs)} micro-batches")
        takes = self._agree_on_shapes(shapes.Boundary.of(rebuild(inputs[0])), targets)
        if self.replicas and any(one.grad is not None for one in self.parameters()):
            raise RuntimeError("a parameter still has a gradient of an earlier step, and that is a "
                               "sum over the replicas already: call zero_grad() first")
        if self.last in self.stages:
            targets, rebuild_target = self._split("targets", targets)
        for channel, end in self._ends.items():
            if isinstance(end, Receiver):
                end.expect([takes[max(message[:2])].message(channel.kind)
                            for message in self._messages[channel]])
        for part in (*self.stages.values(), *self._tied):
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
                    k, inputs[k] if number == 0 else arrived, takes[number],
                    rebuild_target(targets[k]) if number == self.last else None, counts[k], version)
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
            sum_in_buckets(nn.ModuleList(self.stages.values()), self.replicas)
        for tied in self._tied:  # last: whatever order replicas were added up in, copies are equal
            tied.sum()
        return self.stages[self.last].total if self.last in self.stages else None

    def _split(self, name, batch):
        """The micro-batches of a batch, each a list of tensors that are views of it; and a function
        that makes of such a list what the batch is, a tensor or a tuple."""
        several = isinstance(batch, tuple)
        tensors, pieces = batch if several else (batch,), self.schedule.microbatches
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or not tensor.dim():
                raise TypeError(f"{name}: a tensor with a first dimension to divide is needed, or "
                                f"a tuple of them, not {type(tensor).__name__}")
            if not len(tensor) or len(tensor) % pieces or len(tensor) != len(tensors[0]):
                raise ValueError(f"{name}: {pieces} micro-batches of one size cannot be made of "
                                 f"{' and '.join(str(len(one)) for one in tensors)} rows")
        parts = zip(*(tensor.detach().chunk(pieces) for tensor in tensors), strict=True)
        return list(parts), tuple if several else (lambda part: part[0])

    def _agree_on_shapes(self, start, targets):
        """By stage, what it takes. Each stage is tried in turn, and tells all ranks what came."""
        if start in self._boundaries:
            return self._boundaries[start]
        told = [None] * len(self.schedule)
        dist.all_gather_object(told, start, group=self.group)
        for rank, other in enumerate(told):
            if other != told[0]:
                raise ValueError(
                    f"ranks were given other inputs: a micro-batch is {told[0]} on rank 0 of the "
                    f"pipeline, and {other} on rank {rank}")
        takes = [start]
        for stage, owner in enumerate(self.schedule.placement):
            told = [None]
            if owner == self.rank:
                try:
                    if stage == self.last:
                        self._split("targets", targets)
                    own = self.stages[stage]
                    told = [shapes.after(own.layers, takes[stage], own.first)]
                except (TypeError, ValueError) as error:
                    told = [type(error)(str(error))]
            dist.broadcast_object_list(told, group=self.group, group_src=owner)
            if isinstance(told[0], Exception):  # raised on every rank: none goes on to wait
                raise told[0]
            takes += told
        self._boundaries[start] = takes
        return takes

    def _group_of(self, purpose):
        """Which process group serves a Channel, or the ranks that share a parameter: its ranks in
        the world, and the purpose."""
        ranks = purpose[:2] if isinstance(purpose, Channel) else purpose
        return tuple(sorted(dist.get_global_rank(self.group, rank) for rank in ranks)), purpose

    def _open_channels(self):
        """This rank's ends, {Channel: Sender or Receiver}."""
        gpu = dist.get_backend(self.group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
        ends = {}
        for channel in self._messages:
            if self.rank in channel[:2]:
                sends = self.rank == channel.from_rank
                peer = dist.get_global_rank(self.group, channel.to_rank if sends else
                                            channel.from_rank)
                end = Sender if sends else Receiver
                ends[channel] = end(self._groups[self._group_of(channel)], peer, device)
        return ends


def stand_aside():
    """What a rank of the world that is in no pipeline calls while others make theirs.

    Torch makes process groups on all ranks at once. On a mesh (`mesh.Mesh`) no rank calls this:
    each is in a pipeline, and all make theirs by the one line `Pipeline(..., mesh.pipeline)`.
    """
    meet({}, 60.0)
