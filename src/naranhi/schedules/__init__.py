"""Pipeline schedules as data: which rank does what in which order, checked, timed and compared.

`check` says whether a schedule, one of these or your own, is right, and `simulate` computes what
it costs. `with_sharding` adds the actions of ZeRO, which `transfers` counts. `peak_versions` and
`staleness` describe a schedule without a flush. `write_csv` and `read_csv` exchange schedules with
`torch.distributed.pipelining`; `read_trace` reads what `measure.write_trace` wrote. Nothing here
needs torch.
"""

from naranhi.schedules.asynchronous import (
    check_versions,
    live_versions,
    peak_versions,
    pipedream,
    pipedream_2bw,
    releases,
    staleness,
    versions_read,
)
from naranhi.schedules.flush import gpipe, in_turn, inter_layer, interleaved, one_f_one_b
from naranhi.schedules.grading import Grade, grade
from naranhi.schedules.names import get
from naranhi.schedules.schedule import (
    Action,
    Channel,
    Message,
    Overlap,
    Schedule,
    ScheduleError,
)
from naranhi.schedules.sharding import Transfers, gathered, transfers, with_sharding
from naranhi.schedules.simulation import simulate
from naranhi.schedules.timeline import Span, Timeline
from naranhi.schedules.torch_csv import read_csv, write_csv
from naranhi.schedules.trace import read_trace
from naranhi.schedules.v_shaped import dualpipe_v, zero_bubble_v
from naranhi.schedules.validate import channels, check, in_order
from naranhi.schedules.zero_bubble import split_backwards, zero_bubble_h1, zero_bubble_h2

__all__ = [
    "Action",
    "Channel",
    "Grade",
    "Message",
    "Overlap",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "Transfers",
    "channels",
    "check",
    "check_versions",
    "dualpipe_v",
    "gathered",
    "get",
    "gpipe",
    "grade",
    "in_order",
    "in_turn",
    "inter_layer",
    "interleaved",
    "live_versions",
    "one_f_one_b",
    "peak_versions",
    "pipedream",
    "pipedream_2bw",
    "read_csv",
    "read_trace",
    "releases",
    "simulate",
    "split_backwards",
    "staleness",
    "transfers",
    "versions_read",
    "with_sharding",
    "write_csv",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
]
