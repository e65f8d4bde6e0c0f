"""Pipeline schedules: each a few lines that read like the diagram of it, and nothing else.

``schedules.check(schedule)`` says whether a schedule, one of these or one of your own, is right;
`naranhi.simulate` says what it costs; `write_csv` and `read_csv` exchange it with
`torch.distributed.pipelining`. What a schedule is made of stands in `naranhi.actions`, what makes
it right in `naranhi.schedule_check`.

Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline
parallelism" (2019).
"""

import csv
import re

from naranhi.actions import Action, Channel, Message, Schedule, ScheduleError
from naranhi.schedule_check import channels, check, in_order

__all__ = [
    "Action",
    "Channel",
    "Message",
    "Schedule",
    "ScheduleError",
    "channels",
    "check",
    "gpipe",
    "in_order",
    "inter_layer",
    "read_csv",
    "write_csv",
]


def inter_layer(stages, microbatches):
    """Inter-layer model parallelism (Huang et al. 2019, figure 2b): a micro-batch at a time.

    Each goes through all stages and back before the next one starts. One rank works at a time, so
    with p stages 1/p of the machine is used; a rank holds the activations of one micro-batch.
    """
    _positive(stages=stages, microbatches=microbatches)
    return Schedule(
        [Action(stage, kind, k) for k in range(microbatches) for kind in "FB"]
        for stage in range(stages)
    )


def gpipe(stages, microbatches):
    """GPipe: all forwards, then all backwards (Huang et al. 2019, figure 2c).

    With stages of equal speed the bubble is (p - 1) / (m + p - 1) for p stages and m
    micro-batches, and every rank comes to hold the activations of all m. The backwards take the
    micro-batches in the order of the forwards, where the paper's figure takes the last one first:
    bubble and memory are the same, and gradients are summed as in a plain loop.
    """
    _positive(stages=stages, microbatches=microbatches)
    return Schedule(
        [Action(stage, kind, k) for kind in "FB" for k in range(microbatches)]
        for stage in range(stages)
    )


def _positive(**numbers):
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")


# --- exchange with torch.distributed.pipelining -------------------------------------------------


def write_csv(schedule, path):
    """Write a file that torch's pipeline runtime loads (its form "compute_only"): a row per rank.

    ScheduleError when a schedule updates weights on its way, for which torch's form has no word.
    """
    for rank, row in enumerate(schedule):
        for action in row:
            if action.kind == "U" or action.version:
                why = "torch's CSV knows no updates and no versions of weights"
                raise ScheduleError(f"rank {rank}: cannot write {action}, {why}", rank, action)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(schedule)


def read_csv(path):
    """The schedule in a file that torch wrote, in either of its forms; not checked yet.

    What follows from a schedule anyway is left out: idle steps, sends and receives, and what
    `fully_shard` does around them. A forward and a backward that torch runs as one are read as the
    forward and then the backward. ScheduleError for anything else that is no action.
    """
    with open(path, newline="") as file:
        rows = [";".join(_FUSED.sub(r"\1", cell) for cell in row) for row in csv.reader(file)]
    rows = [[name.strip() for name in row.split(";")] for row in rows]
    try:
        return Schedule([name for name in row if not _IMPLIED.fullmatch(name)] for row in rows)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", error.rank) from None


_FUSED = re.compile(r"\((.*)\)OVERLAP_F_B")
_IMPLIED = re.compile(r"|[0-9]+((SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
