"""When each action of a schedule runs, if every action takes as long as one says.

A rank does one action at a time, in its schedule's order, each as soon as what it needs has come.
Times are in any unit that is used throughout. Numbers of any kind do: with `fractions.Fraction`
(and latency=0) the results are exact.
"""

from math import isfinite

from naranhi.schedules.timeline import Span, Timeline
from naranhi.schedules.validate import check, in_order


def simulate(
    schedule,
    forward=1.0,
    backward=2.0,
    latency=0.0,
    input_grad=None,
    weight_grad=None,
    update=0.0,
):
    """The Timeline of a schedule, from time 0.

    forward, backward: the time of an F and of a B, a number or a list by virtual stage.
    input_grad, weight_grad: likewise for an I and a W; each half of `backward` when neither is
        given.
    update: likewise for a U.
    latency: the latency of a message between two ranks; the sender does not wait for it, and
    messages
        do not get into each other's way. Between stages on one rank nothing travels.

    Raises ScheduleError as `schedules.check` does, and ValueError for times that make no sense.
    """
    check(schedule)
    if (input_grad is None) != (weight_grad is None):
        raise ValueError("give both input_grad and weight_grad, or neither")
    _check_time("latency", latency)
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
            arrival[message] = end + latency if schedule.channel(message) else end
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
