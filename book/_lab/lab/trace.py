"""A timeline that was measured, beside its simulation; or a schedule's file, beside another one."""

from collections import defaultdict
from statistics import median
from typing import Any

from lab.fields import Field, InputError
from lab.schedule import FIELDS as SCHEDULE
from lab.schedule import MOST_ACTIONS, drawn, made, typed
from naranhi import schedules
from naranhi.schedules import Schedule, Timeline

FIELDS = (Field("file", "file"), Field("file_name", "text"), *SCHEDULE)


def run(
    file: str, file_name: str, schedule: str, own: str, compare: str, **values: Any
) -> dict[str, Any]:
    """Return the timeline in a file beside a simulated one, and the difference by action.

    A trace stands beside the simulation of its own schedule, with the median of what was measured
    for each kind of action and virtual stage as times. A schedule's CSV is simulated with the times
    of the lab, and stands beside the schedule that is chosen there.
    """
    del compare
    if file.lstrip()[:1] in ("{", "["):
        try:
            measured = schedules.read_trace(file)
        except ValueError as error:
            raise InputError("no_trace", name=file_name, why=str(error)) from None
        actions = sum(map(len, measured))
        if actions > MOST_ACTIONS:
            raise InputError("too_many_actions", actions=actions, most=MOST_ACTIONS)
        simulated = simulated_as(measured)
        return _beside(measured, simulated, "measured", "simulated", "s")
    if not file.strip() or not _is_csv(file):
        raise InputError("no_trace", name=file_name, why="")
    times = {
        name: values[name]
        for name in ("forward", "backward", "input_grad", "weight_grad", "latency", "bandwidth")
    }
    ours = schedules.simulate(typed(file), **times)
    chosen = typed(own) if schedule == "own" else made(schedule, **values)
    return _beside(ours, schedules.simulate(chosen, **times), "file", schedule, "")


def simulated_as(measured: Timeline) -> Timeline:
    """Return the simulation of a measured timeline's schedule, with its median times."""
    schedule = Schedule([span.action for span in row] for row in measured)
    seconds = defaultdict(list)
    for row in measured:
        for action, start, end in row:
            seconds[action.kind, action.stage].append(end - start)
    stages = schedule.virtual_stages
    times = {
        name: [median(seconds[kind, stage] or [0.0]) for stage in range(stages)]
        for name, kind in (
            ("forward", "F"),
            ("backward", "B"),
            ("input_grad", "I"),
            ("weight_grad", "W"),
            ("update", "U"),
        )
    }
    return schedules.simulate(schedule, **times)


def _is_csv(text):
    """Whether a text may be a schedule's: it has the name of an action somewhere."""
    words = text.replace(",", " ").split()
    return any(word[:1].isdigit() and word.strip("0123456789")[:1] in "FBIWU" for word in words)


def _beside(first, second, first_name, second_name, unit):
    begun = min(row[0].start for row in first)
    other = {span.action: span for row in second for span in row}
    rows = []
    for rank, row in enumerate(first):
        for action, start, end in row:
            if action in other:
                _, expected, until = other[action]
                late = start - begun - expected
                longer = (end - start) - (until - expected)
                rows.append([rank, str(action), start - begun, expected, late, longer])
    outputs = {
        name: {"value": getattr(first, name), "unit": "%" if name == "bubble_rate" else unit}
        | {"other": getattr(second, name)}
        for name in ("bubble_rate", "cost")
    }
    return {
        "timelines": [drawn(first, first_name), drawn(second, second_name)],
        "outputs": outputs,
        "differences": rows,
        "unit": unit,
    }
