"""Run a rank's row of a schedule: receive what an action needs, run it, send what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch

from naranhi.pipeline.gradient_sums import has_parts, sum_before_update
from naranhi.schedules import Action, Schedule, releases
from naranhi.schedules.schedule import SHARDING

if TYPE_CHECKING:
    from naranhi.measure import Recorder
    from naranhi.pipeline.messages import Messages
    from naranhi.pipeline.microbatches import Microbatches
    from naranhi.pipeline.sharding import ShardedStages
    from naranhi.pipeline.stage import Stage
    from naranhi.pipeline.stage_signature import StageSignature


class Row:
    """This rank's actions, in turn.

    Args:
        schedule: the schedule.
        rank: this rank, in the pipeline.
        stages: {virtual stage: `Stage`} of this rank.
        messages: this rank's ends of the channels.
        overlap: as `pipeline.Pipeline` takes it.
        sharded: the stages as they are sharded over replicas; None if they are whole.
    """

    schedule: Schedule
    stages: Mapping[int, Stage]
    messages: Messages
    overlap: Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]] | None
    sharded: ShardedStages | None

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        messages: Messages,
        overlap: Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]] | None,
        sharded: ShardedStages | None,
    ) -> None:
        self.schedule, self.stages, self.messages = schedule, stages, messages
        self.overlap, self.sharded = overlap, sharded
        self._turns = _turns(schedule.units[rank], overlap is not None)
        self._releases = releases(schedule)[rank]
        self._in_part = {number for number, stage in stages.items() if has_parts(stage)}

    def run(
        self, batch: Microbatches, takes: Sequence[StageSignature], recorder: Recorder | None
    ) -> None:
        """Run every action on a batch.

        Args:
            batch: the micro-batches.
            takes: the signature before each virtual stage, and after the last.
            recorder: records when each action ran.
        """
        for turn in self._turns:  # one action, or the two of a pair
            calls = [
                partial(self._do, *one, self._take(one[1]), batch=batch, takes=takes)
                for one in turn
            ]
            if recorder:
                recorder.begin()
            results = self.overlap(*calls) if len(calls) == 2 else [calls[0]()]
            if recorder:
                for _, action in turn:
                    recorder.end(action)
            for (_, action), result in zip(turn, results, strict=True):
                self.messages.give(self.schedule.gives(action), result)
            del calls, results, result  # otherwise they would live until the next turn is over

    def _take(self, action):
        """Wait for what an action needs: a message, or the parameters of its stage."""
        if self.sharded and action.kind not in SHARDING:
            self.sharded.wait(action.stage)
        return self.messages.take(self.schedule.needs(action))

    def _do(self, position, action, arrived, *, batch, takes):
        if action.kind in SHARDING:
            return self._transfer(action)
        stage, released = self.stages[action.stage], self._releases.get(position)
        if action.kind == "U" and action.stage in self._in_part:
            sum_before_update(stage)
        result = _run(stage, action, arrived, released, batch, takes)
        if released:
            stage.weights.release(released[1])
        return result

    def _transfer(self, action):
        if action.kind == "UNSHARD":
            self.sharded.unshard(action.stage)
        elif action.kind == "RESHARD":
            self.sharded.reshard(action.stage)
        elif torch.is_grad_enabled():
            self.sharded.reduce_grad(action.stage)


def _run(stage, action: Action, arrived, released, batch, takes):
    number, kind, k, version = action
    if kind == "F":
        return stage.run_forward(
            k,
            batch.inputs[k] if number == 0 else arrived,
            takes[number],
            takes[number + 1],
            batch.target(k) if stage.loss else None,
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


def _turns(units, overlap):
    """Return the turns of a rank, each a list of (position in the row, action).

    The two actions of a pair are one turn if they overlap, otherwise two.
    """
    row = enumerate(chain.from_iterable(units))
    pairs = [list(islice(row, len(unit))) for unit in units]
    return pairs if overlap else [[numbered] for pair in pairs for numbered in pair]
