"""The parts of a schedule: actions, and for each rank a sequence of them.

A model is cut into *virtual stages*, 0 to V - 1, each on one rank (one per rank, or several in an
interleaved schedule). A schedule says only what each rank does, and in what order. The messages
follow from it: a forward on stage s sends an activation to stage s + 1, a backward sends a
gradient to stage s - 1, and a message travels if the two stages are on different ranks.

The names of actions are those of `torch.distributed.pipelining`. Sources: Huang et al., "GPipe"
(2019), for micro-batches; Qi et al., "Zero bubble pipeline parallelism" (2024), for the backward
in two parts; Narayanan et al., "PipeDream" (2019) and "Memory-efficient pipeline-parallel DNN
training" (2021), for weight versions; DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section
3.2.1, for a forward and a backward that overlap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import index
from typing import NamedTuple

SHARDING = "UNSHARD", "RESHARD", "REDUCE_GRAD"  # kinds of action between ranks with shards; ZeRO


class ScheduleError(ValueError):
    """A schedule that is not right.

    Args:
        message: What is wrong.
        rank: The rank at fault, or None; also an attribute.
        action: The action at fault, or None; also an attribute.
    """

    rank: int | None
    action: Action | None

    def __init__(self, message: str, rank: int | None = None, action: Action | None = None):
        super().__init__(message)
        self.rank, self.action = rank, action


class Action(NamedTuple):
    """One action of a rank; `str` returns its name, and `Action.parse` turns a name into an action.

    ======  =====================================================================================
    name    kind
    ======  =====================================================================================
    2F0     "F": the forward of micro-batch 0 on virtual stage 2
    2B0     "B": its whole backward
    2I0     "I": only the gradient of the stage's input, which the previous stage waits for
    2W0     "W": only the gradient of the weights, which no rank waits for; some time after 2I0
    2U1     "U": apply all gradients since the last update to the newest weights of stage 2, which
            makes version 1 of them; only in schedules without a flush (microbatch is None)
    2F5@1   a forward that reads version 1 of its stage's weights; so does its backward
    ======  =====================================================================================

    2UNSHARD, 2RESHARD and 2REDUCE_GRAD, of the kinds in `SHARDING`, gather the weights of stage 2,
    free them, and reduce its gradients, where ranks have shards of it (microbatch is None).

    A stage's weights begin as version 0. With a flush they stay version 0 for the whole schedule.
    """

    stage: int
    kind: str
    microbatch: int | None
    version: int = 0

    @classmethod
    def parse(cls, name: str) -> Action:
        """Return the action of that name.

        Raises:
            ScheduleError: If the name is not the name of an action.
        """
        match = re.fullmatch(r"([0-9]+)([FBIWU])([0-9]+)(?:@([0-9]+))?", name)
        if match and (not match[4] or match[2] == "F"):
            stage, kind, number, version = match.groups()
            if kind == "U":
                return cls(int(stage), kind, None, int(number))
            return cls(int(stage), kind, int(number), int(version or 0))
        match = re.fullmatch(r"([0-9]+)([A-Z_]+)", name)
        if match and match[2] in SHARDING:
            return cls(int(match[1]), match[2], None)
        raise ScheduleError(f"{name!r} is not an action: expected a name such as 2F0, 2B0 or 2U1")

    def __str__(self) -> str:
        if self.kind in SHARDING:
            return f"{self.stage}{self.kind}"
        if self.kind == "U":
            return f"{self.stage}U{self.version}"
        return f"{self.stage}{self.kind}{self.microbatch}" + f"@{self.version}" * bool(self.version)

    __repr__ = __str__


class Overlap(NamedTuple):
    """A forward and a backward of another micro-batch, which a rank may run at the same time.

    The pair needs the messages of both before it starts. `str` returns torch's name for it,
    (0F4;7B0)OVERLAP_F_B, and `Overlap.parse` turns that name into a pair.
    """

    forward: Action
    backward: Action

    @classmethod
    def parse(cls, name: str) -> Overlap:
        """Return the pair of that name.

        Raises:
            ScheduleError: If the name is not that of a forward and a backward.
        """
        match = re.fullmatch(r"\(([^;]*);([^;]*)\)OVERLAP_F_B", name)
        pair = cls(*map(Action.parse, match.groups())) if match else None
        if pair is None or pair.forward.kind != "F" or pair.backward.kind not in "BIW":
            raise ScheduleError(
                f"{name!r} is not a pair: expected a forward, then a backward, such as "
                f"(0F4;7B0)OVERLAP_F_B"
            )
        return pair

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    __repr__ = __str__


class Message(NamedTuple):
    """An activation that a stage sends to the next, or a gradient that it sends to the previous."""

    from_stage: int
    to_stage: int
    microbatch: int


class Channel(NamedTuple):
    """The ordered path of one kind of message, "activation" or "gradient", between two ranks."""

    from_rank: int
    to_rank: int
    kind: str


@dataclass(frozen=True, repr=False, init=False)
class Schedule:
    """The actions of each rank: `schedule[rank]` is a tuple of actions, in the order of execution.

    A Schedule need not be right: `check` says whether it is. Schedules with equal rows and pairs
    are equal.

    Args:
        rows: One row per rank, each a sequence of actions and pairs (`Overlap`) or of their names,
            or a string of names with spaces between; or one string with a line per rank, which is
            also what `str` returns.

    Raises:
        ScheduleError: If an item of a row is not an action or a pair; nothing else is checked here.

    Attributes:
        units: For each rank what it runs in turn: tuples of one action, or of the forward and the
            backward of a pair.
        rows: The same actions, one by one: of a pair, first the forward.
    """

    units: tuple[tuple[tuple[Action, ...], ...], ...]

    def __init__(self, rows: str | Iterable[str | Iterable[Action | Overlap | str]]) -> None:
        lines = rows.strip().splitlines() if isinstance(rows, str) else rows
        object.__setattr__(self, "units", tuple(_row(rank, row) for rank, row in enumerate(lines)))

    @cached_property
    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """For each rank its actions one by one, in the order of execution."""
        return tuple(tuple(chain.from_iterable(units)) for units in self.units)

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self.rows[rank]

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(name_of, units)) for units in self.units)

    def __repr__(self) -> str:
        return f'Schedule("""\n{self}\n""")'

    @property
    def stages(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def virtual_stages(self) -> int:
        """The number of virtual stages on all ranks together."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        numbers = [a.microbatch for row in self.rows for a in row if a.microbatch is not None]
        return max(numbers, default=-1) + 1

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each virtual stage, as a tuple.

        Raises:
            ScheduleError: If a stage is on two ranks or on none, or a rank has no action.
        """
        ranks = {}
        for rank, row in enumerate(self.rows):
            if not row:
                raise ScheduleError(f"rank {rank} has nothing to do", rank)
            for action in row:
                if ranks.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"rank {rank} runs {action}, but stage {action.stage} is on rank "
                        f"{ranks[action.stage]}: a stage is on one rank",
                        rank,
                        action,
                    )
        missing = next((stage for stage in range(len(ranks)) if stage not in ranks), None)
        if missing is not None:
            last = max(ranks)
            rank = ranks[last]
            action = next(action for action in self.rows[rank] if action.stage == last)
            message = f"rank {rank} runs {action}, but no rank runs stage {missing}"
            raise ScheduleError(message, rank, action)
        return tuple(ranks[stage] for stage in range(len(ranks)))

    def needs(self, action: Action) -> Message | None:
        """Return the message that an action waits for, whether it travels or not; or None."""
        stage, kind, microbatch, _ = action
        if kind == "F" and stage > 0:
            return Message(stage - 1, stage, microbatch)
        if kind in ("B", "I") and stage < len(self.placement) - 1:
            return Message(stage + 1, stage, microbatch)
        return None

    def gives(self, action: Action) -> Message | None:
        """Return the message that an action produces, whether it travels or not; or None."""
        stage, kind, microbatch, _ = action
        if kind == "F" and stage < len(self.placement) - 1:
            return Message(stage, stage + 1, microbatch)
        if kind in ("B", "I") and stage > 0:
            return Message(stage, stage - 1, microbatch)
        return None

    def channel(self, message: Message) -> Channel | None:
        """Return the channel on which a message travels; None if both stages are on one rank."""
        return self._channels[message.from_stage, message.to_stage]

    @cached_property
    def _channels(self):
        """The channel of a message, or None, by the message's two stages."""
        channels, of = {}, self.placement
        for stage in range(1, len(of)):
            apart = of[stage - 1] != of[stage]
            activations = Channel(of[stage - 1], of[stage], "activation") if apart else None
            gradients = Channel(of[stage], of[stage - 1], "gradient") if apart else None
            channels[stage - 1, stage], channels[stage, stage - 1] = activations, gradients
        return channels


def name_of(unit: tuple[Action, ...]) -> str:
    """Return the name of what a rank runs in one turn: that of an action or of a pair."""
    return str(unit[0] if len(unit) == 1 else Overlap(*unit))


def _row(rank, row):
    try:
        return tuple(map(_unit, row.split() if isinstance(row, str) else row))
    except ScheduleError as error:
        raise ScheduleError(f"rank {rank}: {error}", rank) from None


def _unit(item):
    """Return an action or a pair, given itself or its name, as a tuple of actions."""
    if not isinstance(item, (str, Action, Overlap)):
        raise ScheduleError(f"{item!r} is not an action")
    name = str(item)
    return tuple(Overlap.parse(name)) if name.startswith("(") else (Action.parse(name),)


def require_positive(**numbers: object) -> None:
    """Raise ValueError for a number that is not a whole number of at least 1, numpy's included."""
    for name, number in numbers.items():
        if not hasattr(number, "__index__") or index(number) < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
