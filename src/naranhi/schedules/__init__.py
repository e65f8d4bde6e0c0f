"""Pipeline schedules as data: who does what in which order, checked, timed and compared.

`check` says whether a schedule, one of these or one of your own, is right, and `simulate` what it
costs; `versions_held` and `staleness` say what it does without a flush; `write_csv` and `read_csv`
exchange it with `torch.distributed.pipelining`. Nothing here needs torch.
"""

from naranhi.schedules.asynchronous import (
    check_versions,
    held_after,
    pipedream,
    releases,
    staleness,
    two_buffered,
    versions_held,
    versions_read,
)
from naranhi.schedules.flush import gpipe, in_turn, inter_layer, interleaved, one_f_one_b
from naranhi.schedules.grading import Verdict, judge
from naranhi.schedules.schedule import Action, Channel, Message, Schedule, ScheduleError
from naranhi.schedules.simulation import simulate
from naranhi.schedules.timeline import Span, Timeline
from naranhi.schedules.torch_csv import read_csv, write_csv
from naranhi.schedules.validate import channels, check, in_order
from naranhi.schedules.zero_bubble import split_backwards, zero_bubble_h1, zero_bubble_h2

__all__ = [
    "Action",
    "Channel",
    "Message",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "Verdict",
    "channels",
    "check",
    "check_versions",
    "gpipe",
    "held_after",
    "in_order",
    "in_turn",
    "inter_layer",
    "interleaved",
    "judge",
    "one_f_one_b",
    "pipedream",
    "read_csv",
    "releases",
    "simulate",
    "split_backwards",
    "staleness",
    "two_buffered",
    "versions_held",
    "versions_read",
    "write_csv",
    "zero_bubble_h1",
    "zero_bubble_h2",
]
