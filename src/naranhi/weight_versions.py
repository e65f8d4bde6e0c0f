"""Versions of the weights in a schedule without a flush: how many are held, and how stale they are.

All of it follows from the schedule: an update makes a version, and a forward names the one that it
reads. Sources: Narayanan et al., "PipeDream" (2019), for stashing and staleness; Narayanan et al.,
"Memory-efficient pipeline-parallel DNN training" (2021), for two versions.

Each function checks the schedule first, and raises ScheduleError as `schedules.check` does. The
time that it takes grows with the number of actions.
"""

from naranhi.actions import ScheduleError
from naranhi.schedule_check import check


def releases(schedule):
    """What can be let go of: by rank, a dictionary {position in its row: (stage, version)}.

    After the action at that position nobody on the rank needs that version of the stage's weights
    any more: each forward that reads it has been followed by its whole backward, and the update
    that changes it has been made. The last version of a stage is the result, and not among them.
    """
    check(schedule)
    return tuple(_releases(row) for row in schedule)


def _releases(row):
    last, read, newest = {}, {}, {}  # (stage, version): position; (stage, micro-batch): version
    for position, (stage, kind, microbatch, version) in enumerate(row):
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


def held_after(schedule):
    """By rank, for each of its actions: the versions of that stage's weights held once it is done.

    A version is held from the update that makes it, or from the start, until nobody needs it.
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


def versions_held(schedule):
    """By virtual stage, the most versions of its weights held at once between two actions.

    1 throughout with a flush; p - stage in `pipedream`, once it is in its steady state; 2 in
    `two_buffered` with enough micro-batches.
    """
    most = [1] * schedule.virtual_stages
    for row, counts in zip(schedule, held_after(schedule), strict=True):
        for action, count in zip(row, counts, strict=True):
            most[action.stage] = max(most[action.stage], count)
    return tuple(most)


def check_versions(schedule, most):
    """Return if no stage comes to hold more versions of its weights than `most`.

    most: a number, or a list by virtual stage (such as a stage's share of memory, divided by the
    bytes of its weights). Raises ScheduleError naming the rank, the stage, what it needs and what
    it may have, with the action after which it is too much; ValueError for a list of another length
    and for a bound that is not a whole number of at least 1.
    """
    stages = schedule.virtual_stages
    allowed = list(most) if isinstance(most, (list, tuple)) else [most] * stages
    if len(allowed) != stages:
        raise ValueError(f"{len(allowed)} bounds for {stages} virtual stages")
    for bound in allowed:
        if not isinstance(bound, int) or bound < 1:
            raise ValueError(f"a stage holds a whole number of versions, 1 or more, not {bound!r}")
    needed = versions_held(schedule)
    for rank, (row, counts) in enumerate(zip(schedule, held_after(schedule), strict=True)):
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


def versions_read(schedule):
    """By micro-batch, the version of each virtual stage's weights that it reads: tuples of tuples.

    Equal numbers in a tuple: the micro-batch sees the weights of one moment (vertical sync).
    """
    check(schedule)
    read = [[0] * schedule.virtual_stages for _ in range(schedule.microbatches)]
    for row in schedule:
        for action in row:
            if action.kind == "F":
                read[action.microbatch][action.stage] = action.version
    return tuple(map(tuple, read))


def staleness(schedule):
    """By virtual stage, for each of its updates: how many updates old the gradients are.

    An update that makes version t + 1 from version t, with gradients for version t - d, has
    staleness d: 0 is plain gradient descent. Of several gradients the stalest counts.
    """
    read = versions_read(schedule)
    found = [[] for _ in range(schedule.virtual_stages)]
    for row in schedule:
        oldest = {}  # by stage, of the gradients since its last update
        for stage, kind, microbatch, version in row:
            if kind in ("B", "W"):
                its = read[microbatch][stage]
                oldest[stage] = min(oldest.get(stage, its), its)
            elif kind == "U":
                found[stage].append(version - 1 - oldest.pop(stage))
    return tuple(map(tuple, found))
