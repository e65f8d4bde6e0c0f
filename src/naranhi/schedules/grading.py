"""Grade a schedule of your own: is it right, and within a budget of time, memory and messages?

Grading needs no ranks; a schedule that passes still has to run on real ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from naranhi.schedules.schedule import Action, Schedule, ScheduleError
from naranhi.schedules.simulation import simulate
from naranhi.schedules.timeline import Timeline
from naranhi.schedules.validate import channels


@dataclass(frozen=True)
class Grade:
    """The verdict on a schedule; true if it has no fault.

    Attributes:
        faults: One sentence for each fault.
        schedule: The schedule that was graded; None if it is not right.
        timeline: The simulated timeline; None if the schedule is not right, or has the wrong number
            of ranks or micro-batches.
    """

    faults: tuple[str, ...]
    schedule: Schedule | None = None
    timeline: Timeline | None = None

    def __bool__(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        return "; ".join(self.faults) or "passes"


def grade(
    rows: Schedule | str | Sequence[str | Sequence[Action | str]],
    stages: int,
    microbatches: int,
    *,
    cost: float,
    max_activations: float,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    latency: float = 0.0,
    messages: int | None = None,
) -> Grade:
    """Return the Grade of a schedule, as far as a simulation can tell.

    A wrong schedule is reported in the Grade, not raised. `forward`, `input_grad` and `weight_grad`
    are times of one micro-batch on all of a rank's part of the model; if a rank has several chunks,
    each takes an equal share. A whole backward takes as long as its two parts.

    Args:
        rows: A Schedule, or what one is built from: for each rank a string of names, or a sequence.
        stages: The number of ranks required.
        microbatches: The number of micro-batches required.
        cost: The longest time that the schedule may take, in the unit of the times.
        max_activations: The most micro-batches whose activations a rank may hold at once.
        forward: The time of the forward.
        input_grad: The time of the gradient of the input.
        weight_grad: The time of the gradient of the weights.
        latency: The latency of a message, as in `simulate`.
        messages: The most messages that may be sent; None for any number.

    Raises:
        ValueError: If a time is negative or not finite, as in `simulate`.
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
    # Chunks take fractions of a unit, and rounding may change the last digits of their sum.
    if timeline.cost > cost * (1 + 1e-9):
        faults += (f"takes {float(timeline.cost):g}, where {cost:g} is the budget",)
    most = max(timeline.peak_activations)
    if most > max_activations:
        rank = timeline.peak_activations.index(most)
        budget = f"{max_activations:g} is the budget"
        faults += (f"rank {rank} holds {most:g} micro-batches, where {budget}",)
    sent = sum(map(len, channels(schedule).values()))
    if messages is not None and sent > messages:
        faults += (f"sends {sent} messages, where {messages} is the budget",)
    return Grade(faults, schedule, timeline)


def _counted(schedule, stages, microbatches):
    """Return a fault for each of the two numbers that is not the required one."""
    return tuple(
        f"{what}: {is_}, but {due} are required"
        for what, is_, due in (
            ("ranks", schedule.stages, stages),
            ("micro-batches", schedule.microbatches, microbatches),
        )
        if is_ != due
    )
