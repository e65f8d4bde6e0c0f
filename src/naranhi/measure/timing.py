"""Honest times: contenders in turn, the slowest rank's time, no barrier inside.

A barrier inside the timed span would be timed too; one contender after the other would meet another
machine (other users, other clock speed) than the next; one rank's time would miss the rank that is
late. Units: seconds.
"""

from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist


def interleaved(
    contenders: dict[str, Callable[[], object]], repeats=20, warmup=3, group=None
) -> dict[str, list[float]]:
    """Time the contenders in turn, `repeats` times each: {name: seconds of each repetition}.

    Call it on every rank of `group` (None: the default group), with the same names in the same
    order. Every repetition runs each contender once. Before each run, and outside its time, the
    ranks meet in a barrier; the time of a run is that of the slowest rank, and every rank returns
    the same numbers. On a GPU a run lasts until the device has finished.

    Raises ValueError when there is no contender or `repeats` is below 1.
    """
    if not contenders or repeats < 1:
        raise ValueError("measure at least one contender, at least once")
    group = dist.group.WORLD if group is None else group
    settle = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"

    mine = torch.zeros(repeats, len(contenders), dtype=torch.float64)
    for repeat in range(-warmup, repeats):
        for column, run in enumerate(contenders.values()):
            dist.barrier(group)
            settle()
            start = perf_counter()
            run()
            settle()
            if repeat >= 0:
                mine[repeat, column] = perf_counter() - start
    slowest = mine.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(contenders, slowest.T.tolist(), strict=True))


def _nothing():
    """A CPU has finished when the call returns."""


@contextmanager
def unchecked_group(ranks=None, timeout=20.0):
    """A process group of these ranks (None: all) without TORCH_DISTRIBUTED_DEBUG's checks, to time.

    With DETAIL every collective first compares its arguments across the ranks, which costs more
    than a small collective itself. Enter and leave it on *every* rank of the default group, members
    or not: a rank that is not in `ranks` is given torch's mark for that, and any collective on it
    is refused. `timeout` is the deadline of each collective, in seconds.
    """
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    try:
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), group_desc="unchecked")
    finally:
        dist.set_debug_level(level)
    try:
        yield group
        dist.barrier()  # nobody closes its connections while another rank still needs them
    finally:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


CPU = torch.device("cpu")


def best_seconds(
    runs: dict[object, Callable[[], object]], device=CPU, repeats=15, span=2e-3
) -> dict[object, float]:
    """Seconds of one call of each of `runs`, from the best of `repeats` repetitions.

    The runs take turns, so that a disturbance does not hit all the repetitions of one of them. A
    repetition makes as many calls as fill `span` seconds, at least one; on a GPU it ends when the
    device has finished them. Raises ValueError when there is no run or `repeats` is below 1.
    """
    if not runs or repeats < 1:
        raise ValueError("measure at least one run, at least once")
    on_gpu = torch.device(device).type == "cuda"
    settle = torch.cuda.synchronize if on_gpu else lambda: None

    def seconds(run, calls):
        settle()
        start = perf_counter()
        for _ in range(calls):
            run()
        settle()
        return (perf_counter() - start) / calls

    best, calls = {}, {}
    for name, run in runs.items():
        seconds(run, 1)  # the first call also pays for memory and set-up
        best[name] = min(seconds(run, 1) for _ in range(3))
        calls[name] = max(1, round(span / best[name]))
    for _ in range(repeats):
        for name, run in runs.items():
            best[name] = min(best[name], seconds(run, calls[name]))
    return best
