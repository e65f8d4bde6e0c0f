"""Exchange schedules with `torch.distributed.pipelining`, as CSV files in its format.

A schedule of your own can then run on torch's runtime, and torch's schedules can be drawn and
simulated here.
"""

import csv
import re
from collections.abc import Iterable
from os import PathLike

from naranhi.schedules.schedule import SHARDING, Schedule, ScheduleError, name_of
from naranhi.schedules.validate import units_in_order


def write_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a file that torch's pipeline runtime loads: one row per rank.

    The format is "compute_only", to which torch adds all other actions. With actions of ZeRO
    (`with_sharding`) it is "compute_comms", which has these actions and all sends and receives.

    Raises:
        ScheduleError: If the schedule updates weights or reads a later version of them, because
            torch's format has no name for either.
    """
    for rank, row in enumerate(schedule):
        for action in row:
            if action.kind == "U" or action.version:
                why = "torch's CSV knows no updates and no versions of weights"
                raise ScheduleError(f"rank {rank}: cannot write {action}, {why}", rank, action)
    sharded = any(action.kind in SHARDING for row in schedule for action in row)
    rows = _with_messages(schedule) if sharded else [map(name_of, row) for row in schedule.units]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def _with_messages(schedule):
    """Return the rows as names, with a send after each action and a receive before another's.

    Between two ranks, torch has one order of all messages. The receives are in the order in which
    one process that runs all ranks would send the messages.
    """
    rows = [[] for _ in schedule]
    for rank, unit in units_in_order(schedule):
        rows[rank].append(name_of(unit))
        for action in unit:
            message = schedule.gives(action)
            channel = message and schedule.channel(message)
            if channel:
                kind = "F" if action.kind == "F" else "B"
                sender, receiver, number = message
                rows[rank].append(f"{sender}SEND_{kind}{number}")
                rows[channel.to_rank].append(f"{receiver}RECV_{kind}{number}")
    return rows


def read_csv(path: str | PathLike[str] | Iterable[str], sharding: bool = False) -> Schedule:
    """Return the schedule in a file that torch wrote, in either of its formats, unchecked.

    Idle steps, sends and receives are left out: they follow from a schedule. A forward and a
    backward that torch runs as one action are read as a pair (`Overlap`).

    Args:
        path: The file, or its lines: an open file, or a list of strings.
        sharding: Whether to read the actions of ZeRO as well. Torch writes them for every schedule,
            whether its stages are sharded or not.

    Raises:
        ScheduleError: If anything else in the file is not an action, or it is not a CSV.
    """
    if not isinstance(path, (str, PathLike)):
        return _schedule(path, sharding)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return _schedule(file, sharding)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path} is not a CSV of a schedule: {error}") from None
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", error.rank) from None


def _schedule(lines, sharding):
    rows = [[name.strip() for name in row] for row in csv.reader(lines)]
    left_out = _MESSAGE if sharding else _IMPLIED
    return Schedule([name for name in row if not left_out.fullmatch(name)] for row in rows)


_MESSAGE = re.compile(r"|[0-9]+(SEND|RECV)_[FB][0-9]+")
_IMPLIED = re.compile(rf"{_MESSAGE.pattern}|[0-9]+({'|'.join(SHARDING)})")
