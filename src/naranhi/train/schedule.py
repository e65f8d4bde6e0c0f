"""The schedules that training can use, and the one that the options select."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator

from naranhi import schedules

CHUNKS = 2  # stages of each rank without `--chunks`, for a schedule that takes any number
TAKES = ["stages", "microbatches"], ["stages", "microbatches", "chunks"]


def schedule_names() -> Iterator[str]:
    """Yield the names of the schedules that a training can use.

    These are the functions of `naranhi.schedules` that require stages, micro-batches and maybe
    chunks, and whose schedules do not update the weights during a step.
    """
    for name in schedules.__all__:
        function = getattr(schedules, name)
        if not inspect.isfunction(function) or (needed := _needed(function)) not in TAKES:
            continue
        if not actions_of(function(*(1, 2, 2)[: len(needed)]), "U"):
            yield name


def takes_chunks(name: str) -> bool:
    """Return whether a schedule is made for any number of stages on each rank."""
    return "chunks" in _needed(getattr(schedules, name))


def schedule_type(name: str) -> str:
    """Return the name of a schedule's function, given that name or torch's for the schedule."""
    try:
        return schedules.get(name).__name__
    except ValueError:
        return name  # not one of the choices, so argparse rejects it


def make_schedule(options: argparse.Namespace, stages: int) -> schedules.Schedule:
    """Return the schedule for pipelines of `stages` ranks, with the actions of `--zero`.

    Raises:
        ValueError: no such schedule exists for these numbers of ranks, micro-batches and chunks.
    """
    chunks = {"chunks": options.chunks or CHUNKS} if takes_chunks(options.schedule) else {}
    make = getattr(schedules, options.schedule)
    schedule = make(stages, options.microbatches, **chunks)
    if not options.zero:
        return schedule
    # Note [ZeRO-1 in a pipeline]
    # To a schedule, gradients that are reduced once, into shards, are stage 2 of ZeRO. But they are
    # kept whole until then, which costs the memory of stage 1.
    return schedules.with_sharding(schedule, max(options.zero, 2), reduce_each=options.zero == 2)


def actions_of(schedule: schedules.Schedule, kind: str) -> list[schedules.Action]:
    """Return the actions of a kind, such as "U" or "I", in a schedule."""
    return [action for row in schedule for action in row if action.kind == kind]


def _needed(function):
    """Return the names of the arguments without a default."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.default is one.empty]
