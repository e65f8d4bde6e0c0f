"""ZeRO in a pipeline: when a stage is gathered, freed and reduced, as actions of the schedule.

Several pipelines share a batch, and the ranks that run the same stage hold shards of it: of its
gradients (stage 2 of ZeRO), or of its parameters as well (stage 3). If each forward and each
backward gathers its own parameters, as ZeRO does without a pipeline, a step gathers them twice for
each micro-batch. A pipeline has many micro-batches in a step, so the schedule decides instead.

Source: the actions, their names and the order in which stages are gathered ahead are those of
`torch.distributed.pipelining` (`_add_unshard_reshard`, `_add_reduce_grad`). Lamy-Poirier,
"Breadth-first pipeline parallelism" (2023), section 4, on schedules that gather seldom.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from naranhi.schedules.schedule import SHARDING, Action, Overlap, Schedule, ScheduleError
from naranhi.schedules.validate import check

Unit = tuple[Action, ...]


class Transfers(NamedTuple):
    """How often a step gathers a stage's parameters, and how often it reduces its gradients."""

    gathers: int
    reductions: int


def with_sharding(
    schedule: Schedule, stage: int, *, keep: int | None = None, reduce_each: bool = False
) -> Schedule:
    """Return a schedule with the actions of ZeRO: gradients in shards, or parameters as well.

    A virtual stage of P parameters on n ranks with m micro-batches then sends, for each of its
    gathers and reductions, (n - 1) / n x P values. With a whole backward, that is one gather if the
    stage stays gathered for the step, and 2m if nothing is kept. `transfers` counts them.

    Args:
        schedule: A schedule with a flush, without such actions.
        stage: The stage of ZeRO. 2 adds reductions; 3 gathers and frees the parameters, too.
        keep: At stage 3, how many virtual stages a rank keeps gathered: those that it needs next,
            gathered ahead. None keeps each until its last use. 0 gathers a stage for one action (or
            for the two of a pair), and frees it at once.
        reduce_each: Whether gradients are reduced after every backward, so that no rank keeps whole
            gradients between two of them, instead of once, after the last.

    Raises:
        ScheduleError: If the schedule is not right, updates weights, or has such actions already.
        ValueError: If `stage` is not 2 or 3, `keep` is not a whole number of at least 0, or `keep`
            is given at stage 2.
    """
    check(schedule)
    for rank, row in enumerate(schedule):
        for action in row:
            if action.kind in (*SHARDING, "U"):
                why = "give a schedule with a flush and without actions of ZeRO"
                raise ScheduleError(f"rank {rank} has {action} already: {why}", rank, action)
    if stage not in (2, 3):
        raise ValueError(
            f"stage is 2 or 3, not {stage!r}: stage 1 needs no action of a schedule, but an "
            "optimizer that shards its own state over the replicas, as torch's "
            "ZeroRedundancyOptimizer does"
        )
    if keep is not None and (not hasattr(keep, "__index__") or keep < 0):
        raise ValueError(f"keep must be a whole number of at least 0, or None, not {keep!r}")
    if keep is not None and stage == 2:
        raise ValueError(f"keep={keep} is for stage 3: at stage 2 all parameters stay whole")
    rows = schedule.units if stage == 2 else [_gathered(row, keep) for row in schedule.units]
    return Schedule(
        [unit[0] if len(unit) == 1 else Overlap(*unit) for unit in _reduced(row, reduce_each)]
        for row in rows
    )


def _gathered(units: tuple[Unit, ...], keep: int | None) -> Iterator[Unit]:
    """Yield a row with an UNSHARD before a stage is needed, and a RESHARD where it is freed."""
    soon, order = [], []  # before each unit: the stages that are still needed, the next one first
    for unit in reversed(units):
        order = list(dict.fromkeys([*(action.stage for action in unit), *order]))
        soon.append(order)
    held = []
    for unit, order in zip(units, reversed(soon), strict=True):
        own = len({action.stage for action in unit})
        wanted = order if keep is None else order[: max(keep, own)]
        yield from ((Action(one, "RESHARD", None),) for one in held if one not in wanted)
        yield from ((Action(one, "UNSHARD", None),) for one in wanted if one not in held)
        yield unit
        held = sorted(wanted)
        if keep == 0:
            yield from ((Action(one, "RESHARD", None),) for one in held)
            held = []
    yield from ((Action(one, "RESHARD", None),) for one in held)


def _reduced(units, each):
    """Yield a row with a REDUCE_GRAD after the last backward of each stage, or after each."""
    units = list(units)
    backwards = [[action.stage for action in unit if action.kind in ("B", "W")] for unit in units]
    left = Counter(chain.from_iterable(backwards))
    for unit, stages in zip(units, backwards, strict=True):
        yield unit
        for stage in stages:
            left[stage] -= 1
            if each or not left[stage]:
                yield (Action(stage, "REDUCE_GRAD", None),)


def transfers(schedule: Schedule) -> tuple[Transfers, ...]:
    """Return, by virtual stage, how often a step gathers and reduces it."""
    count = Counter((action.stage, action.kind) for row in schedule for action in row)
    return tuple(
        Transfers(count[stage, "UNSHARD"], count[stage, "REDUCE_GRAD"])
        for stage in range(schedule.virtual_stages)
    )


def gathered(schedule: Schedule) -> tuple[tuple[frozenset[int], ...], ...]:
    """Return, for each rank and after each of its actions, the virtual stages that are whole.

    A stage counts from its UNSHARD on. Without such actions all stages of a rank are whole.
    """
    return tuple(map(_whole, schedule))


def _whole(row):
    whole, after = {action.stage for action in row}, []
    if any(action.kind == "UNSHARD" for action in row):
        whole = set()
    for action in row:
        if action.kind == "UNSHARD":
            whole.add(action.stage)
        elif action.kind == "RESHARD":
            whole.discard(action.stage)
        after.append(frozenset(whole))
    return tuple(after)
