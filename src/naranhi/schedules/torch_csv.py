"""Exchange schedules with `torch.distributed.pipelining`, as CSV files in its format.

A schedule of your own can then run on torch's runtime, and torch's schedules can be drawn and
simulated here.
"""

import csv
import re
from os import PathLike

from naranhi.schedules.schedule import Schedule, ScheduleError, name_of


def write_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a file that torch's pipeline runtime loads (format "compute_only"): one row per rank.

    Raises:
        ScheduleError: If the schedule updates weights or reads a later version of them, because
            torch's format has no name for either.
    """
    for rank, row in enumerate(schedule):
        for action in row:
            if action.kind == "U" or action.version:
                why = "torch's CSV knows no updates and no versions of weights"
                raise ScheduleError(f"rank {rank}: cannot write {action}, {why}", rank, action)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(map(name_of, units) for units in schedule.units)


def read_csv(path: str | PathLike[str]) -> Schedule:
    """Return the schedule in a file that torch wrote, in either of its formats, unchecked.

    What follows from a schedule anyway is left out: idle steps, sends and receives, and what
    `fully_shard` does around them. A forward and a backward that torch runs as one action are read
    as a pair (`Overlap`).

    Raises:
        ScheduleError: If anything else in the file is not an action.
    """
    with open(path, newline="") as file:
        rows = [[name.strip() for name in row] for row in csv.reader(file)]
    try:
        return Schedule([name for name in row if not _IMPLIED.fullmatch(name)] for row in rows)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", error.rank) from None


_IMPLIED = re.compile(r"|[0-9]+((SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
