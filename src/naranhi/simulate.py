"""When each action of a schedule runs, if every action takes as long as one says.

A rank does one action at a time, in its schedule's order, each as soon as what it needs has come.
Times are in any unit that is used throughout. Numbers of any kind do: with `fractions.Fraction`
(and hop=0) the results are exact.
"""

from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from naranhi.schedules import Action, check, in_order


class Span(NamedTuple):
    """From when to when an action ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """What each rank did and when, simulated or measured: ``timeline[rank]`` is a tuple of spans.

    A rank's spans are in the order of doing and do not overlap; what lies between them is waiting.
    Times are in one unit (seconds, when measured) on one clock, whose zero means nothing.
    ValueError for a rank without spans, and for spans that overlap or end before they start.
    """

    rows: tuple[tuple[Span, ...], ...]

    def __post_init__(self):
        object.__setattr__(self, "rows", tuple(map(tuple, self.rows)))
        for rank, spans in enumerate(self.rows):
            if not spans:
                raise ValueError(f"rank {rank} did nothing")
            free = spans[0].start
            for action, start, end in spans:
                if not free <= start <= end:
                    raise ValueError(
                        f"rank {rank}: {action} from {start} to {end}, but it was busy until {free}"
                    )
                free = end

    def __getitem__(self, rank):
        return self.rows[rank]

    def __len__(self):
        return len(self.rows)

    def __repr__(self):
        numbers = f"cost={float(self.cost):g}, bubble_rate={float(self.bubble_rate):.3g}"
        return f"<Timeline of {len(self)} ranks: {numbers}>"

    @property
    def work(self):
        """By rank, the time spent on actions."""
        return tuple(sum(end - start for _, start, end in spans) for spans in self.rows)

    @property
    def cost(self):
        """The largest, over the ranks, of the time from a rank's first action to its last."""
        return max(spans[-1].end - spans[0].start for spans in self.rows)

    @property
    def bubble_rate(self):
        """The share of ranks x cost that is not work: 1 - sum(work) / (ranks x cost).

        0 when no time passes at all.
        """
        if not self.cost:
            return 0.0
        return 1 - sum(self.work) / (len(self.rows) * self.cost)

    @property
    def peak_activations(self):
        """By rank, the largest number of micro-batches whose activations it held at once.

        They are held from the start of an F to the end of its B, or of its W when the backward is
        in two parts. One of a rank's n virtual stages counts 1/n.
        """
        return tuple(_peak([action for action, _, _ in spans]) for spans in self.rows)


def _peak(actions):
    held = peak = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak / len({action.stage for action in actions})


def simulate(
    schedule,
    forward=1.0,
    backward=2.0,
    hop=0.0,
    input_grad=None,
    weight_grad=None,
    update=0.0,
):
    """The Timeline of a schedule, from time 0.

    forward, backward: the time of an F and of a B, a number or a list by virtual stage.
    input_grad, weight_grad: likewise for an I and a W; each half of `backward` when neither is
        given.
    update: likewise for a U.
    hop: the latency of a message between two ranks; the sender does not wait for it, and messages
        do not get into each other's way. Between stages on one rank nothing travels.

    Raises ScheduleError as `schedules.check` does, and ValueError for times that make no sense.
    """
    check(schedule)
    if (input_grad is None) != (weight_grad is None):
        raise ValueError("give both input_grad and weight_grad, or neither")
    _check_time("hop", hop)
    stages = schedule.virtual_stages
    times = {
        kind: _by_stage(name, given, stages)
        for kind, name, given in (
            ("F", "forward", forward),
            ("B", "backward", backward),
            ("U", "update", update),
        )
    }
    if input_grad is None:
        times["I"] = times["W"] = [time / 2 for time in times["B"]]
    else:
        times["I"] = _by_stage("input_grad", input_grad, stages)
        times["W"] = _by_stage("weight_grad", weight_grad, stages)

    free = [0] * len(schedule)  # by rank, when it has ended its last action
    arrival = {}  # of each message that is on its way
    spans = [[] for _ in schedule]
    for rank, action in in_order(schedule):
        start = max(free[rank], arrival.pop(schedule.needs(action), 0))
        free[rank] = end = start + times[action.kind][action.stage]
        spans[rank].append(Span(action, start, end))
        # A link with a bandwidth would also keep, by channel, when it is free again.
        if message := schedule.gives(action):
            arrival[message] = end + hop if schedule.channel(message) else end
    return Timeline(spans)


def _by_stage(name, given, stages):
    """A list of times by virtual stage."""
    times = list(given) if isinstance(given, (list, tuple)) else [given] * stages
    if len(times) != stages:
        raise ValueError(f"{name} has {len(times)} times for {stages} virtual stages")
    for time in times:
        _check_time(name, time)
    return times


def _check_time(name, time):
    if not (isfinite(time) and time >= 0):
        raise ValueError(f"{name} must be a time, not {time!r}")
