"""Record what each rank does and when, as the Timeline that `schedules.simulate` computes.

Each rank records the start and end of every action on its own clock; waiting is not recorded.
Afterwards the ranks align their clocks. Ranks on one machine read the same clock. Between machines
the offset is measured by round trips that carry the time, and is accurate to half of the shortest
round trip.

Source: Cristian, "Probabilistic clock synchronization" (1989).
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from naranhi.distributed import device_of, from_all_ranks
from naranhi.schedules import Action, Span, Timeline

if TYPE_CHECKING:
    from fractions import Fraction

ROUND_TRIPS = 20  # of which only the shortest counts


class Recorder:
    """A recorder of one rank's actions: `pipeline.step(..., recorder=recorder)`.

    On a GPU each action lasts until the device has finished it, so a recorded step takes somewhat
    longer than an unrecorded one. Call `clear` before the step of interest.
    """

    def __init__(self):
        self._spans = []

    def begin(self) -> None:
        """Record that an action begins now."""
        _finish_stream()
        self._start = perf_counter()

    def end(self, action: Action) -> None:
        """Record that `action`, which began last, ends now."""
        _finish_stream()
        self._spans.append(Span(action, self._start, perf_counter()))

    def clear(self) -> None:
        """Delete everything recorded so far."""
        self._spans.clear()

    def gather(self, group: dist.ProcessGroup | None = None) -> Timeline:
        """Return the Timeline of all ranks of the group (None: the default one), on each of them.

        Call this on every rank. Times are in seconds; 0 is the start of the first action of all.

        Raises:
            ValueError: a rank has recorded nothing.
        """
        group = dist.group.WORLD if group is None else group
        offset = clock_offset(group)
        spans = [(action, start + offset, end + offset) for action, start, end in self._spans]
        rows = from_all_ranks(spans, group)
        zero = min((start for row in rows for _, start, _ in row), default=0.0)
        return Timeline(
            [Span(action, start - zero, end - zero) for action, start, end in row] for row in rows
        )


def _finish_stream():
    """Wait for the current stream of the GPU, if this process uses one, not for the whole device.

    Messages wait on other streams, perhaps for what follows this action. See
    [The first steps between GPUs] in `naranhi.pipeline.channels`.
    """
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def clock_offset(group: dist.ProcessGroup | None = None) -> float:
    """Return the seconds to add to this rank's `perf_counter()` to get that of rank 0.

    The offset is exactly 0 if both ranks are on one machine, because they read one clock. Every
    rank of the group (None: the default one) calls this at the same time.
    """
    group = dist.group.WORLD if group is None else group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    clocks = from_all_ranks(_clock(), group)
    offset = 0.0
    for other in range(1, ranks):
        if clocks[other] == clocks[0]:
            continue
        if rank == 0:
            _tell_time(group, other)
        elif rank == other:
            offset = measured_offset(group)
    return offset


def measured_offset(group: dist.ProcessGroup, peer: int = 0) -> float:
    """Return this rank's estimate of the offset, by round trips to a peer in `_tell_time`."""
    best = (float("inf"), 0.0)
    for _ in range(ROUND_TRIPS):
        message = _message(group)
        asked = perf_counter()
        dist.send(message, group=group, group_dst=peer)
        dist.recv(message, group=group, group_src=peer)
        clock = message.item()  # over NCCL, only this waits for the message
        answered = perf_counter()
        # Assume that the peer read its clock halfway through the round trip.
        best = min(best, (answered - asked, clock - (asked + answered) / 2))
    return best[1]


def _tell_time(group, other):
    for _ in range(ROUND_TRIPS):
        message = _message(group)
        dist.recv(message, group=group, group_src=other)
        message.item()  # as above
        dist.send(message.fill_(perf_counter()), group=group, group_dst=other)


def _message(group):
    return torch.zeros(1, dtype=torch.float64, device=device_of(group))


def _clock():
    """Return which clock `perf_counter` reads: Linux has one for all processes, since its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else None


def write_trace(timeline: Timeline, path: str | Path, unit: float | Fraction = 1.0) -> None:
    """Write a timeline, measured or simulated, as a trace with a row for each rank.

    The file is JSON in Chrome's "Trace Event Format", which https://ui.perfetto.dev and
    chrome://tracing can open.

    Args:
        timeline: the timeline to write.
        path: the file to write.
        unit: the timeline's unit of time, in seconds.

    Raises:
        OSError: the file cannot be written.
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
