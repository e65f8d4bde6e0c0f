"""Whether a schedule of one's own is right, and keeps to a budget of time, memory and messages.

What is judged here is judged without a rank; whoever passes has still to run on real ones.
"""

from dataclasses import dataclass

from naranhi.schedules.schedule import Schedule, ScheduleError
from naranhi.schedules.simulation import simulate
from naranhi.schedules.timeline import Timeline
from naranhi.schedules.validate import channels


@dataclass(frozen=True)
class Grade:
    """What there is to say about a schedule; true where nothing speaks against it.

    faults: a sentence for each thing that does. schedule, timeline: what was judged, and
    how long it takes, simulated; None where it is not right.
    """

    faults: tuple[str, ...]
    schedule: Schedule | None = None
    timeline: Timeline | None = None

    def __bool__(self):
        return not self.faults

    def __str__(self):
        return "; ".join(self.faults) or "passes"


def grade(
    rows,
    stages,
    microbatches,
    cost,
    held,
    forward=1.0,
    input_grad=1.0,
    weight_grad=1.0,
    latency=0.0,
    messages=None,
):
    """The Grade on a schedule, as far as simulating it can tell.

    rows: a Schedule, or what one is built from: for each rank a text of names, or a sequence.
    stages, microbatches: how many ranks and micro-batches it has to have.
    cost: the longest that it may take, in the unit of the times. held: the most micro-batches whose
        activations a rank may hold at once.
    forward, input_grad, weight_grad: what all that a rank has of the model takes for a micro-batch;
        where a rank has it in several chunks, each takes an equal part. A whole backward takes as
        long as its two parts. latency: as `simulate` is given it.
    messages: the most that may be sent, None for any number.

    Raises nothing for a wrong schedule, that being a verdict; ValueError for times that make no
    sense, as `simulate` does.
    """
    try:
        schedule = rows if isinstance(rows, Schedule) else Schedule(rows)
        faults = _counted(schedule, stages, microbatches)
        if faults:
            return Grade(faults, schedule)
        chunks = schedule.virtual_stages / stages
        forward, input_grad, weight_grad = (
            time / chunks for time in (forward, input_grad, weight_grad)
        )
        timeline = simulate(
            schedule,
            forward,
            input_grad + weight_grad,
            latency=latency,
            input_grad=input_grad,
            weight_grad=weight_grad,
        )
    except ScheduleError as error:
        return Grade((str(error),))
    # Chunks take fractions of a unit, whose sum may be off in the last digits.
    if timeline.cost > cost + 1e-9:
        faults += (f"takes {float(timeline.cost):g}, where {cost:g} is the budget",)
    most = max(timeline.peak_activations)
    if most > held:
        rank = timeline.peak_activations.index(most)
        faults += (f"rank {rank} holds {most:g} micro-batches, where {held:g} is the budget",)
    sent = sum(map(len, channels(schedule).values()))
    if messages is not None and sent > messages:
        faults += (f"sends {sent} messages, where {messages} is the budget",)
    return Grade(faults, schedule, timeline)


def _counted(schedule, stages, microbatches):
    """What there is too much or too little of."""
    return tuple(
        f"{what}: {is_}, where there are to be {due}"
        for what, is_, due in (
            ("ranks", schedule.stages, stages),
            ("micro-batches", schedule.microbatches, microbatches),
        )
        if is_ != due
    )
