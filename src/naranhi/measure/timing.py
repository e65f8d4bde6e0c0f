"""Fair times: contenders take turns, the slowest rank's time counts, no barrier is timed.

A barrier inside the timed span would be timed too. Contenders that ran one after the other would
meet different conditions (other users, another clock speed). The time of one rank would miss a rank
that is late. Units: seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from naranhi.distributed import device_of


def interleaved(
    contenders: dict[Any, Callable[[], object]],
    repeats: int = 20,
    warmup: int = 3,
    group: dist.ProcessGroup | None = None,
) -> dict[Any, list[float]]:
    """Time the contenders in turn, `repeats` times each.

    Call this on every rank of `group`, with the same names in the same order. Every repetition runs
    each contender once. Before each run, and outside its time, the ranks meet in a barrier. The
    time of a run is that of the slowest rank, and every rank returns the same values. On a GPU a
    run lasts until the device has finished.

    Args:
        contenders: what to time, by name.
        repeats: the number of timed repetitions.
        warmup: the number of repetitions before them, which are not timed.
        group: the ranks; None is the default group.

    Returns:
        By name, the seconds of each repetition.

    Raises:
        ValueError: there are no contenders, `repeats` is below 1, or `warmup` below 0.
    """
    if not contenders or repeats < 1 or warmup < 0:
        raise ValueError(
            f"contenders and repeats must be at least 1, and warmup at least 0, not "
            f"{len(contenders)}, {repeats} and {warmup}"
        )
    group = dist.group.WORLD if group is None else group
    device = device_of(group)

    seconds = torch.zeros(repeats, len(contenders), dtype=torch.float64)
    for repeat in range(-warmup, repeats):
        for column, run in enumerate(contenders.values()):
            dist.barrier(group)
            _settle()
            start = perf_counter()
            run()
            _settle()
            if repeat >= 0:
                seconds[repeat, column] = perf_counter() - start
    slowest = seconds.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(contenders, slowest.T.tolist(), strict=True))


def _settle():
    """Wait for the GPU, if this process uses one; otherwise waiting would create a CUDA context."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def unchecked_group(
    ranks: Sequence[int] | None = None, timeout: float = 20.0
) -> Iterator[dist.ProcessGroup]:
    """Make a process group without the checks of TORCH_DISTRIBUTED_DEBUG, for timing.

    With DETAIL every collective first compares its arguments across the ranks, which costs more
    than a small collective itself. Enter and leave the context on *every* rank of the default
    group, member or not.

    Args:
        ranks: the members of the group; None is all ranks.
        timeout: the deadline of each collective, in seconds.

    Yields:
        The group, or torch's `GroupMember.NON_GROUP_MEMBER` on a rank that is not in `ranks`, with
        which no collective runs.
    """
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    try:
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), group_desc="unchecked")
    finally:
        dist.set_debug_level(level)
    try:
        yield group
        dist.barrier()  # no rank closes its connections while another rank needs them
    finally:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


CPU = torch.device("cpu")


def best_seconds(
    runs: dict[Any, Callable[[], object]],
    device: torch.device | str = CPU,
    repeats: int = 15,
    span: float = 2e-3,
) -> dict[Any, float]:
    """Return the seconds of one call of each of `runs`, from the best of `repeats` repetitions.

    The runs take turns, so that a disturbance does not hit all repetitions of one run. A repetition
    makes as many calls as fill `span` seconds, at least one; on a GPU it ends when the device has
    finished them. The single calls that determine this number count as repetitions, too.

    Args:
        runs: what to time, by name.
        device: where the runs compute.
        repeats: the number of repetitions.
        span: the length of a repetition, in seconds.

    Raises:
        ValueError: there are no runs, or `repeats` is below 1.
    """
    if not runs or repeats < 1:
        raise ValueError(f"runs and repeats must be at least 1, not {len(runs)} and {repeats}")
    on_gpu = torch.device(device).type == "cuda"
    settle = partial(torch.cuda.synchronize, device) if on_gpu else lambda: None

    def seconds(run, calls):
        settle()
        start = perf_counter()
        for _ in range(calls):
            run()
        settle()
        return (perf_counter() - start) / calls

    best, calls = {}, {}
    for name, run in runs.items():
        seconds(run, 1)  # the first call also allocates memory and sets up
        best[name] = min(seconds(run, 1) for _ in range(3))
        calls[name] = max(1, round(span / best[name]))
    for _ in range(repeats):
        for name, run in runs.items():
            best[name] = min(best[name], seconds(run, calls[name]))
    return best
