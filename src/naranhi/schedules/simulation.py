"""Compute when each action of a schedule runs, given how long each action takes.

A rank runs one action at a time, in its schedule's order, and starts each as soon as the message
that it needs has arrived. The messages of an UNSHARD or a REDUCE_GRAD go over a
separate link, behind the rank's actions. All times are in one unit of your choice. Numbers of any
type work: with `fractions.Fraction` the results are exact.
"""

from math import isfinite

from naranhi.schedules.schedule import SHARDING, Schedule
from naranhi.schedules.timeline import Span, Timeline
from naranhi.schedules.validate import check, units_in_order


def simulate(
    schedule: Schedule,
    forward: float | list[float] | tuple[float, ...] = 1.0,
    backward: float | list[float] | tuple[float, ...] = 2.0,
    *,
    latency: float = 0,
    bandwidth: float | None = None,
    input_grad: float | list[float] | tuple[float, ...] | None = None,
    weight_grad: float | list[float] | tuple[float, ...] | None = None,
    update: float | list[float] | tuple[float, ...] = 0,
    overlapped: float | list[float] | tuple[float, ...] | None = None,
    unshard: float | list[float] | tuple[float, ...] = 0,
    reduce_grad: float | list[float] | tuple[float, ...] = 0,
) -> Timeline:
    """Return the Timeline of a schedule, from time 0.

    Args:
        schedule: The schedule to simulate.
        forward: The time of an F, one for all stages or a list by virtual stage.
        backward: The time of a B, in the same form.
        latency: The latency of a message between two ranks. The sender does not wait for it.
            Between stages on one rank nothing travels.
        bandwidth: The messages that a link carries in a unit of time, one after another; a link
            leads from one rank to another, and activations and gradients share it. None for a link
            on which messages do not delay one another.
        input_grad: The time of an I, in the same form; half of `backward` if neither this nor
            `weight_grad` is given.
        weight_grad: The time of a W, in the same form; the other half of `backward` then.
        update: The time of a U, in the same form.
        overlapped: The time of a forward and a backward that run as a pair (`Overlap`), in the same
            form, by the stage of the forward: both start together, when the messages of both are
            there, and end together. By default one runs after the other.
        unshard: The time of an UNSHARD, in the same form. It starts when the action before it has
            ended and the rank's last UNSHARD or REDUCE_GRAD is over. Meanwhile the rank continues,
            until an action needs the stage. A RESHARD takes no time.
        reduce_grad: The time of a REDUCE_GRAD, in the same form, which starts in the same way. No
            action waits for it.

    Raises:
        ScheduleError: As `schedules.check` does.
        ValueError: If a time is negative or not finite, if `bandwidth` is not positive, if a list
            does not have one time per virtual stage, or if only one of `input_grad` and
            `weight_grad` is given.
    """
    check(schedule)
    if (input_grad is None) != (weight_grad is None):
        raise ValueError("give both input_grad and weight_grad, or neither")
    _check_time("latency", latency)
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, or None, not {bandwidth!r}")
    stages = schedule.virtual_stages
    times = {
        kind: _by_stage(name, given, stages)
        for kind, name, given in (
            ("F", "forward", forward),
            ("B", "backward", backward),
            ("U", "update", update),
            ("UNSHARD", "unshard", unshard),
            ("REDUCE_GRAD", "reduce_grad", reduce_grad),
        )
    }
    if input_grad is None:
        times["I"] = times["W"] = [time / 2 for time in times["B"]]
    else:
        times["I"] = _by_stage("input_grad", input_grad, stages)
        times["W"] = _by_stage("weight_grad", weight_grad, stages)

    if overlapped is not None:
        overlapped = _by_stage("overlapped", overlapped, stages)

    free = [0] * len(schedule)  # by rank: when its last action ended
    link = [0] * len(schedule)  # by rank: when its last transfer ended
    idle = {}  # by (from rank, to rank): when the link has carried its last message
    arrival = {}  # by message in flight: when it arrives
    whole = {}  # by stage: when it is gathered
    spans = [[] for _ in schedule]

    def run(rank, actions, time):
        """Run actions at the same time, once the messages of all are there."""
        needed = [arrival.pop(schedule.needs(action), 0) for action in actions]
        start = max(free[rank], *needed, *(whole.get(action.stage, 0) for action in actions))
        free[rank] = end = start + time
        for action in actions:
            spans[rank].append(Span(action, start, end))
            if message := schedule.gives(action):
                channel = schedule.channel(message)
                arrival[message] = carry(channel[:2], end) + latency if channel else end

    def carry(ranks, time):
        """Return when a message that a rank sends at this time has passed the link."""
        if bandwidth is None:
            return time
        idle[ranks] = max(time, idle.get(ranks, time)) + 1 / bandwidth
        return idle[ranks]

    def transfer(rank, action):
        """Start a transfer behind the rank's actions; a RESHARD only frees memory."""
        start = end = free[rank]
        if action.kind != "RESHARD":
            start = max(free[rank], link[rank])
            link[rank] = end = start + times[action.kind][action.stage]
        if action.kind == "UNSHARD":
            whole[action.stage] = end
        spans[rank].append(Span(action, start, end))

    for rank, unit in units_in_order(schedule):
        if unit[0].kind in SHARDING:
            transfer(rank, unit[0])
        elif overlapped is not None and len(unit) == 2:
            run(rank, unit, overlapped[unit[0].stage])
        else:
            for action in unit:
                run(rank, [action], times[action.kind][action.stage])
    return Timeline(spans)


def _by_stage(name, given, stages):
    """Return a list of times by virtual stage."""
    given = given.tolist() if hasattr(given, "tolist") else given  # of NumPy or torch
    times = list(given) if isinstance(given, (list, tuple)) else [given] * stages
    if len(times) != stages:
        raise ValueError(f"{name} has {len(times)} times for {stages} virtual stages")
    for time in times:
        _check_time(name, time)
    return times


def _check_time(name, time):
    if not (isfinite(time) and time >= 0):
        raise ValueError(f"{name} must be a time, finite and at least 0, not {time!r}")
