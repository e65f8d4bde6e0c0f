"""The schedule lab: what a schedule costs, and when each action runs."""

from typing import Any

from lab.closed_forms import closed_forms
from lab.fields import Field, InputError
from lab.formula import output
from naranhi import schedules
from naranhi.schedules import Schedule, Timeline
from naranhi.schedules.names import OURS
from naranhi.schedules.timeline import total

MOST_ACTIONS = 6000  # that a page draws while a reader waits
CHUNKED = ("interleaved",)
UPDATED = ("pipedream_2bw",)
SPLIT = ("zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v", "dualpipe_v", "own")
NAMES = tuple(OURS)
TIME = {"kind": "times", "high": 1e9, "slider": (0, 8, 0.25)}
TIMES = (
    Field("forward", default="1", **TIME),
    Field("backward", default="2", **TIME),
    Field("input_grad", default="1", **TIME, only=("schedule", SPLIT)),
    Field("weight_grad", default="1", **TIME, only=("schedule", SPLIT)),
    Field("latency", "number", "0", high=1e9, slider=(0, 4, 0.25)),
    Field("bandwidth", "number", "", low=1e-9, high=1e9),
)
FIELDS = (
    Field("schedule", "choice", "one_f_one_b", choices=(*NAMES, "own")),
    Field("own", "text", "", only=("schedule", ("own",))),
    Field("compare", "choice", "", choices=("", *NAMES)),
    Field("stages", "whole", "4", 1, 64, (1, 16, 1)),
    Field("microbatches", "whole", "8", 1, 1024, (1, 64, 1)),
    Field("chunks", "whole", "2", 1, 16, (1, 8, 1), only=("schedule", CHUNKED)),
    Field("updates", "whole", "3", 1, 64, (1, 8, 1), only=("schedule", UPDATED)),
    *TIMES,
)


def run(schedule: str, own: str, compare: str, **values: Any) -> dict[str, Any]:
    """Return the timeline of a schedule, and of another one to compare it with."""
    chosen = typed(own) if schedule == "own" else made(schedule, **values)
    times = {field.name: values[field.name] for field in TIMES}
    line = schedules.simulate(chosen, **times)
    result = {
        "timelines": [drawn(line, schedule)],
        "outputs": outputs(chosen, line, schedule, values),
        "csv": "\n".join(",".join(map(str, _units(row))) for row in chosen.units),
    }
    if compare:
        other = made(compare, **values)
        # A rank has as much to do in both, so a chunk of more has less.
        share = _chunks(chosen) / _chunks(other)
        work = ("forward", "backward", "input_grad", "weight_grad")
        scaled = {n: _times(v, share) if n in work else v for n, v in times.items()}
        line = schedules.simulate(other, **scaled)
        result["timelines"].append(drawn(line, compare))
        result["compared"] = outputs(other, line, compare, values | scaled)
        result["share"] = share
    return result


def made(
    name: str, stages: int, microbatches: int, chunks: int, updates: int, **_: Any
) -> Schedule:
    """Return a schedule of the package.

    Raises:
        InputError: if it has too many actions for a page, before it is made.
    """
    split = name in SPLIT
    several = chunks if name in CHUNKED else 2 if name in ("zero_bubble_v", "dualpipe_v") else 1
    times = updates if name in UPDATED else 1
    _check_size(stages * microbatches * several * times * (3 if split else 2))
    more = (
        {"chunks": chunks} if name in CHUNKED else {"updates": updates} if name in UPDATED else {}
    )
    return schedules.get(name)(stages, microbatches, **more)


def typed(text: str) -> Schedule:
    """Return the schedule that a reader typed: a line for each rank, commas or spaces between.

    Raises:
        InputError: if nothing is there, or too many actions.
        ScheduleError: as `schedules.read_csv` does.
    """
    lines = text.strip().splitlines()
    if not lines:
        raise InputError("nothing_typed")
    _check_size(sum(len(line.replace(",", " ").split()) for line in lines))
    return schedules.read_csv(lines) if "," in text else Schedule(lines)


def _check_size(actions):
    if actions > MOST_ACTIONS:
        raise InputError("too_many_actions", actions=actions, most=MOST_ACTIONS)


def drawn(timeline: Timeline, name: str = "") -> dict[str, Any]:
    """Return what the page draws of a timeline: for each rank its boxes.

    A box is [name, kind, micro-batch, start, end, chunk], where the chunk is counted from 0 on its
    rank, and the two of a pair that run at the same time have a seventh item: 0 above, 1 below.
    """
    rows = []
    for spans in timeline:
        stages = sorted({span.action.stage for span in spans})
        boxes = []
        for place, (action, start, end) in enumerate(spans):
            box = [str(action), action.kind, action.microbatch, start, end]
            box.append(stages.index(action.stage))
            if paired(spans, place):
                box.append(int(place > 0 and spans[place - 1].start == start))
            boxes.append(box)
        rows.append(boxes)
    return {"name": name, "rows": rows}


def paired(spans, place: int) -> bool:
    """Return whether a span runs at the same time as the one before it, or after it."""
    beside = [spans[i] for i in (place - 1, place + 1) if 0 <= i < len(spans)]
    if spans[place].start not in (span.start for span in beside):
        return False
    long = [span for span in (spans[place], *beside) if span.end > span.start]
    return sum(span.start == spans[place].start for span in long) == 2


def outputs(
    schedule: Schedule, line: Timeline, name: str, values: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return bubble, cost, memory and messages, each beside its formula."""
    work = total(line.busy)
    forms = closed_forms(name, values)
    definition = "1 - work / (ranks * cost)" if line.cost else "0"
    sent = sum(map(len, schedules.channels(schedule).values()))
    found = {
        "bubble_rate": output(
            line.bubble_rate, "%", definition, work=work, ranks=len(line), cost=line.cost
        ),
        "cost": output(line.cost),
        "peak_activations": output(list(line.peak_activations)),
        "messages": output(sent),
    }
    for output_name, form in forms.items():
        found[output_name]["closed"] = form
    return found


def _units(units):
    return (schedules.Overlap(*unit) if len(unit) == 2 else unit[0] for unit in units)


def _chunks(schedule):
    return schedule.virtual_stages / schedule.stages


def _times(time, share):
    if share == 1 or time is None:
        return time
    return [one * share for one in time] if isinstance(time, list) else time * share
