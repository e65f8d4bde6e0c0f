"""Schedules without a flush: updates are actions among the others.

A forward may then read weights that its backward no longer finds. How many versions a stage keeps,
and how old the weights are that a gradient is taken at, follows from the schedule alone:
`peak_versions`, `staleness`.
"""

from naranhi.schedules.flush import in_turn
from naranhi.schedules.schedule import Action, Schedule, ScheduleError, _positive
from naranhi.schedules.validate import check


def pipedream(stages, microbatches):
    """PipeDream: 1F1B that never flushes (Narayanan et al. 2019, sections 3.2 and 3.3).

    A stage updates its weights after every backward. A forward reads the newest weights, and its
    backward the same ones again (weight stashing), although p - 1 - stage updates have been made
    meanwhile; so stage s holds up to p - s versions. A stage's forward may read another version
    than the next stage's does of the same micro-batch: there is no vertical sync.
    """
    _positive(stages=stages, microbatches=microbatches)

    def row(stage):
        ahead = stages - stage
        forwards = [Action(stage, "F", k, max(0, k - ahead + 1)) for k in range(microbatches)]
        backwards = [
            [Action(stage, "B", k), Action(stage, "U", None, k + 1)] for k in range(microbatches)
        ]
        return in_turn(ahead, forwards, backwards)

    return Schedule(map(row, range(stages)))


def pipedream_2bw(stages, microbatches, updates):
    """PipeDream-2BW: two versions whatever the depth (Narayanan et al. 2021, section 3.1).

    `updates` batches of `microbatches` each, one update after the last backward of each batch. All
    stages read for batch t the version before the newest: W(t+1) = W(t) - lr grad(W(t-1)), the
    first batch, which has none before, excepted.

    The forwards of batch t start before the backwards of batch t - 1 have ended, and have to find
    update t - 1 made. With enough micro-batches a batch it is; the paper asks for m >= p, and in
    this order m >= p - 1 does. With fewer, batch t reads version t - d with d = ceil((p - 1) / m),
    and d + 1 versions are held: `peak_versions` shows it.
    """
    _positive(stages=stages, microbatches=microbatches, updates=updates)
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


def live_versions(schedule):
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


def peak_versions(schedule):
    """By virtual stage, the most versions of its weights held at once between two actions.

    1 throughout with a flush; p - stage in `pipedream`, once it is in its steady state; 2 in
    `pipedream_2bw` with enough micro-batches.
    """
    most = [1] * schedule.virtual_stages
    for row, counts in zip(schedule, live_versions(schedule), strict=True):
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
