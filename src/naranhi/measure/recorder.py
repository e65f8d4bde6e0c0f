"""What each rank did and when, measured: the same Timeline that `schedules.simulate` computes.

Each rank takes down, by its own clock, when an action began and ended; what it waits for in between
is no action. Afterwards the ranks bring their clocks together. Ranks on one machine read the same
clock; between machines the difference is measured by sending the time to and fro (Cristian,
"Probabilistic clock synchronization", 1989), and known to half of the shortest round trip.
"""

import json
import socket
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from naranhi.schedules import Span, Timeline

ROUND_TRIPS = 20  # of which the shortest counts


class Recorder:
    """Takes down one rank's actions: `pipeline.step(..., recorder=recorder)`.

    On a GPU each action then lasts until the device has finished it, and so a step that is recorded
    takes somewhat longer than one that is not. `clear` before the step to be looked at.
    """

    def __init__(self):
        self._spans = []
        self._settle = _finish_stream if torch.cuda.is_available() else None

    def begin(self):
        """An action begins now."""
        if self._settle:
            self._settle()
        self._start = perf_counter()

    def end(self, action):
        """The action that began last has ended."""
        if self._settle:
            self._settle()
        self._spans.append(Span(action, self._start, perf_counter()))

    def clear(self):
        """Forget everything so far."""
        self._spans.clear()

    def gather(self, group=None):
        """The Timeline of all ranks of the group, on each of them. Call it on every one.

        Times are in seconds, 0 being the first begin of all. ValueError if a rank did nothing.
        """
        group = dist.group.WORLD if group is None else group
        offset = clock_offset(group)
        mine = [(action, start + offset, end + offset) for action, start, end in self._spans]
        rows = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, mine, group=group)
        zero = min((start for row in rows for _, start, _ in row), default=0.0)
        return Timeline(
            [Span(action, start - zero, end - zero) for action, start, end in row] for row in rows
        )


def _finish_stream():
    """Wait for the stream only: messages wait on others, perhaps for what follows this action (see
    [The first steps between GPUs] in `naranhi.pipeline.channels`)."""
    torch.cuda.current_stream().synchronize()


def clock_offset(group=None):
    """What to add to this rank's `perf_counter()` to have that of rank 0, in seconds.

    Exactly 0 where the two are on one machine, and so read one clock. Every rank of the group calls
    this at the same time.
    """
    group = dist.group.WORLD if group is None else group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    clocks = [None] * ranks
    dist.all_gather_object(clocks, _clock(), group=group)
    found = 0.0
    for other in range(1, ranks):
        if clocks[other] == clocks[0]:
            continue
        if rank == 0:
            _tell_time(group, other)
        elif rank == other:
            found = measured_offset(group)
    return found


def measured_offset(group, peer=0):
    """This rank's estimate, from round trips to a peer that runs `_tell_time` meanwhile."""
    best = (float("inf"), 0.0)
    for _ in range(ROUND_TRIPS):
        told = _message(group)
        asked = perf_counter()
        dist.send(told, group=group, group_dst=peer)
        dist.recv(told, group=group, group_src=peer)
        answered = perf_counter()
        # The peer looked at its clock halfway, as far as one can tell.
        best = min(best, (answered - asked, told.item() - (asked + answered) / 2))
    return best[1]


def _tell_time(group, other):
    for _ in range(ROUND_TRIPS):
        told = _message(group)
        dist.recv(told, group=group, group_src=other)
        dist.send(told.fill_(perf_counter()), group=group, group_dst=other)


def _message(group):
    gpu = dist.get_backend(group) == "nccl"
    return torch.zeros(1, dtype=torch.float64, device="cuda" if gpu else "cpu")


def _clock():
    """Which clock perf_counter reads: Linux has one for all processes, since its start."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else None


def write_trace(timeline, path, unit=1.0):
    """Write a timeline, measured or simulated, as a file that https://ui.perfetto.dev and
    chrome://tracing open: the JSON of Chrome's "Trace Event Format", a row for each rank.

    unit: how many seconds the timeline's unit of time is. OSError if the file cannot be written.
    """
    micro = unit * 1e6
    events = []
    for rank, spans in enumerate(timeline):
        place = {"pid": 0, "tid": rank}
        events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": f"rank {rank}"}})
        events += [
            {
                "name": str(action),
                "cat": action.kind,
                "ph": "X",
                **place,
                "ts": float(start * micro),
                "dur": float((end - start) * micro),
                "args": {"stage": action.stage, "micro-batch": action.microbatch},
            }
            for action, start, end in spans
        ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
