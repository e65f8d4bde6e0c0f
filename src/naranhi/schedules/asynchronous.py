"""Schedules without a flush: weight updates are actions among the others.

A forward may read weights that are updated before its backward runs. How many weight versions a
stage keeps, and how old the weights behind a gradient are, follow from the schedule alone: see
`peak_versions` and `staleness`. There are p stages and m micro-batches.
"""

from naranhi.schedules.flush import in_turn
from naranhi.schedules.schedule import SHARDING, Action, Schedule, ScheduleError, require_positive
from naranhi.schedules.validate import check


def pipedream(stages: int, microbatches: int) -> Schedule:
    """Return the PipeDream schedule: 1F1B that never flushes.

    A stage updates its weights after every backward. A forward reads the newest weights, and its
    backward reads the same weights again (weight stashing), although the stage has made
    p - 1 - stage updates in between. Stage s therefore holds up to p - s versions. For the same
    micro-batch, the forwards of two neighbouring stages may read different versions: there is no
    vertical sync.

    Source: Narayanan et al., "PipeDream" (2019), sections 3.2 and 3.3.
    """
    require_positive(stages=stages, microbatches=microbatches)

    def row(stage):
        ahead = stages - stage
        forwards = [Action(stage, "F", k, max(0, k - ahead + 1)) for k in range(microbatches)]
        backwards = [
            [Action(stage, "B", k), Action(stage, "U", None, k + 1)] for k in range(microbatches)
        ]
        return in_turn(ahead, forwards, backwards)

    return Schedule(map(row, range(stages)))


def pipedream_2bw(stages: int, microbatches: int, updates: int) -> Schedule:
    """Return the PipeDream-2BW schedule: two weight versions, whatever the depth.

    A stage makes one update after the last backward of each batch. For batch t, all stages read the
    version before the newest: W(t+1) = W(t) - lr grad(W(t-1)). The first batch is an exception,
    because no earlier version exists.

    The forwards of batch t start before the backwards of batch t - 1 have ended, and need update
    t - 1 to have been made. A batch with enough micro-batches ensures that: the paper asks for
    m >= p, and in this order m >= p - 1 is enough. With fewer micro-batches, batch t reads version
    t - d with d = ceil((p - 1) / m), and a stage holds d + 1 versions: `peak_versions` shows it.

    Args:
        stages: The number of stages, p.
        microbatches: The number of micro-batches in each batch, m.
        updates: The number of batches, with one update each.

    Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (2021), section 3.1.
    """
    require_positive(stages=stages, microbatches=microbatches, updates=updates)
    delay = max(1, -(-(stages - 1) // microbatches))

    def row(stage):
        forwards, backwards = [], []
        for k in range(microbatches * updates):
            batch, place = divmod(k, microbatches)
            forwards.append(Action(stage, "F", k, max(0, batch - delay)))
            backwards.append([Action(stage, "B", k)])
            if place == microbatches - 1:
                backwards[-1].append(Action(stage, "U", None, batch + 1))
        return in_turn(stages - stage, forwards, backwards)

    return Schedule(map(row, range(stages)))


def releases(schedule: Schedule) -> tuple[dict[int, tuple[int, int]], ...]:
    """Return the weight versions that each rank can release, and after which action.

    After that action, no action of the rank needs that version of the stage's weights any more: the
    whole backward has followed each forward that reads the version, and the update that changes the
    version has been made. The last version of a stage is the result, and is not released.

    Returns:
        For each rank, a dictionary {position of the action in the rank's row: (stage, version)}.
    """
    check(schedule)
    return tuple(_releases(row) for row in schedule)


def _releases(row):
    last, read, newest = {}, {}, {}  # (stage, version): position; (stage, micro-batch): version
    for position, (stage, kind, microbatch, version) in enumerate(row):
        if kind in SHARDING:
            continue
        if kind == "U":
            newest[stage] = version
            needed = version - 1
        elif kind == "F":
            needed = read[stage, microbatch] = version
        else:
            needed = read[stage, microbatch]
        last[stage, needed] = position
    return {
        position: (stage, version)
        for (stage, version), position in last.items()
        if version != newest.get(stage, 0)
    }


def live_versions(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the number of versions held of a stage's weights after each of its actions.

    A version is held from the update that makes it, or from the start, until no action needs it.

    Returns:
        For each rank, one count per action of its row: the versions of that action's stage.
    """
    return tuple(
        _held(row, released) for row, released in zip(schedule, releases(schedule), strict=True)
    )


def _held(row, released):
    held, counts = {}, []
    for position, action in enumerate(row):
        change = (action.kind == "U") - (position in released)
        held[action.stage] = held.get(action.stage, 1) + change
        counts.append(held[action.stage])
    return tuple(counts)


def peak_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return, by virtual stage, the most versions of its weights held at once between two actions.

    That is 1 on every stage with a flush, p - stage in `pipedream` once it is in its steady state,
    and 2 in `pipedream_2bw` with enough micro-batches.
    """
    most = [1] * schedule.virtual_stages
    for row, counts in zip(schedule, live_versions(schedule), strict=True):
        for action, count in zip(row, counts, strict=True):
            most[action.stage] = max(most[action.stage], count)
    return tuple(most)


def check_versions(schedule: Schedule, most: int | list[int] | tuple[int, ...]) -> None:
    """Raise ScheduleError if a stage holds more versions of its weights than `most`.

    Args:
        schedule: The schedule to check.
        most: One bound for all stages, or a list by virtual stage (for example each stage's share
            of memory, divided by the bytes of its weights).

    Raises:
        ScheduleError: If a stage exceeds its bound. The message names the rank, the stage, the
            number of versions needed and allowed, and the action after which they are too many.
        ValueError: If the length of the list is not the number of virtual stages, or a bound is not
            an integer of at least 1.
    """
    stages = schedule.virtual_stages
    most = most.tolist() if hasattr(most, "tolist") else most  # of NumPy or torch
    allowed = list(most) if isinstance(most, (list, tuple)) else [most] * stages
    if len(allowed) != stages:
        raise ValueError(f"{len(allowed)} bounds for {stages} virtual stages")
    for bound in allowed:
        if not hasattr(bound, "__index__") or bound < 1:
            raise ValueError(f"a stage holds a whole number of versions, 1 or more, not {bound!r}")
    needed = peak_versions(schedule)
    for rank, (row, counts) in enumerate(zip(schedule, live_versions(schedule), strict=True)):
        for action, count in zip(row, counts, strict=True):
            stage = action.stage
            if count > allowed[stage]:
                raise ScheduleError(
                    f"rank {rank} holds {count} versions of stage {stage}'s weights after "
                    f"{action}: the schedule needs {needed[stage]} at once, and {allowed[stage]} "
                    f"{'is' if allowed[stage] == 1 else 'are'} allowed",
                    rank,
                    action,
                )


def versions_read(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return, by micro-batch, the version that it reads of each virtual stage's weights.

    Equal versions in the tuple of a micro-batch mean that the micro-batch sees the weights of one
    moment (vertical sync).
    """
    check(schedule)
    read = [[0] * schedule.virtual_stages for _ in range(schedule.microbatches)]
    for row in schedule:
        for action in row:
            if action.kind == "F":
                read[action.microbatch][action.stage] = action.version
    return tuple(map(tuple, read))


def staleness(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return, by virtual stage, how many updates old the gradients of each of its updates are.

    An update that makes version t + 1 from version t, with gradients for version t - d, has
    staleness d; plain gradient descent has staleness 0. If an update applies several gradients, the
    stalest counts.
    """
    read = versions_read(schedule)
    versions = [[] for _ in range(schedule.virtual_stages)]
    for row in schedule:
        oldest = {}  # by stage: the oldest version behind the gradients since its last update
        for stage, kind, microbatch, version in row:
            if kind in ("B", "W"):
                its = read[microbatch][stage]
                oldest[stage] = min(oldest.get(stage, its), its)
            elif kind == "U":
                versions[stage].append(version - 1 - oldest.pop(stage))
    return tuple(map(tuple, versions))
