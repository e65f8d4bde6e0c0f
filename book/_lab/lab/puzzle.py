"""A puzzle: a schedule of the reader's own, judged by `schedules.grade`."""

from typing import Any

from lab.fields import Field
from lab.schedule import drawn, typed
from naranhi import schedules

TIME = {"kind": "number", "high": 1e9}
FIELDS = (
    Field("own", "text", str(schedules.zero_bubble_h1(4, 8))),  # where the chapter's hint begins
    Field("stages", "whole", "4", 1, 64),
    Field("microbatches", "whole", "8", 1, 1024),
    Field("cost", default="26", **TIME),
    Field("max_activations", default="5", **TIME),
    Field("messages", "whole", "48", 0, 1e6),
    Field("forward", default="1", **TIME),
    Field("input_grad", default="1", **TIME),
    Field("weight_grad", default="1", **TIME),
    Field("latency", default="0", **TIME),
)


def run(own: str, **budget: Any) -> dict[str, Any]:
    """Return whether a schedule passes, its faults in the package's words, and its timeline."""
    try:
        schedule = typed(own)
    except schedules.ScheduleError as error:
        return {"passes": False, "faults": [str(error)], "timelines": []}
    verdict = schedules.grade(schedule, **budget)
    lines = [] if verdict.timeline is None else [drawn(verdict.timeline, "own")]
    return {"passes": bool(verdict), "faults": list(verdict.faults), "timelines": lines}
