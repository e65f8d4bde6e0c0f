"""Check that a schedule is complete, in order and free of deadlock; derive its message order.

The running time of each function here is linear in the number of actions.
"""

from collections.abc import Iterator
from itertools import chain, zip_longest

from naranhi.schedules.schedule import (
    SHARDING,
    Action,
    Channel,
    Message,
    Schedule,
    ScheduleError,
    name_of,
)
from naranhi.schedules.sharded import check_sharding


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless a schedule is complete, ordered and free of deadlock.

    Complete: every virtual stage is on one rank and runs, for every micro-batch, one F and either
    one B or one I and one W. Ordered: F comes before B or I, and I before W; updates make one
    version after the other, each update has gradients to apply, and no gradient is left over; a
    forward reads a version that exists; the actions of ZeRO, if there are any, come where they
    must (`sharded.check_sharding`). Free of deadlock: `channels` finds the same order of
    messages at both ends, and `in_order` finds an order of all actions. The running time is linear
    in the number of actions. A pair (`Overlap`) starts when the messages of both its actions are
    there, so a forward cannot overlap its own backward.

    Why nothing can block then: let every rank start a send when the action that produces the
    message ends, without waiting for it, and keep the next receive of each channel posted, in the
    channel's order. Both ends of a channel process the same messages in the same order, so the
    oldest message not yet received is the next one that the receiver needs, and a receive is posted
    for it. Hence a rank waits only for actions of other ranks, and in the order that `in_order`
    found, the first action that is not done waits for none.
    """
    if not len(schedule):
        raise ScheduleError("a schedule has at least one rank")
    updates = any(action.kind == "U" for row in schedule for action in row)
    done = [{} for _ in schedule.placement]  # by stage: micro-batch -> its kinds so far, as "FI"
    for rank, row in enumerate(schedule):
        made, unapplied = {}, {}  # by stage: its newest version; the last gradient not yet applied
        for action in row:
            stage, kind, microbatch, version = action
            if kind in SHARDING:
                continue
            if kind == "U":
                _check_update(rank, action, made.get(stage, 0), unapplied.pop(stage, None))
                made[stage] = version
                continue
            so_far = done[stage].get(microbatch, "")
            if so_far != ("FI" if kind == "W" else "" if kind == "F" else "F"):
                raise _disorder(rank, action, so_far)
            done[stage][microbatch] = so_far + kind
            if kind == "F" and version > made.get(stage, 0):
                raise ScheduleError(
                    f"rank {rank} runs {action}, but version {version} of stage {stage}'s weights "
                    f"is not made before it: {made.get(stage, 0)} is the newest",
                    rank,
                    action,
                )
            if kind in ("B", "W"):
                unapplied[stage] = action
        if updates and unapplied:
            action = next(iter(unapplied.values()))
            raise ScheduleError(
                f"rank {rank} never applies the gradient of {action}: no update follows it",
                rank,
                action,
            )
        for forward, backward in (unit for unit in schedule.units[rank] if len(unit) == 2):
            if forward[::2] == backward[::2]:  # stage and micro-batch
                raise ScheduleError(
                    f"rank {rank} overlaps {forward} with {backward}, its own backward, which "
                    f"needs it",
                    rank,
                    backward,
                )
    for stage, of_stage in enumerate(done):
        _check_complete(schedule, stage, of_stage)
    check_sharding(schedule)
    channels(schedule)
    for _ in in_order(schedule):
        pass


def _check_update(rank, action, newest, gradient):
    if action.version != newest + 1:
        due = action._replace(version=newest + 1)
        raise ScheduleError(f"rank {rank} runs {action} where {due} is due", rank, action)
    if gradient is None:
        why = "no backward since the last update gave it a gradient to apply"
        raise ScheduleError(f"rank {rank} runs {action}, but {why}", rank, action)


def _disorder(rank, action, so_far):
    if action.kind in so_far:
        return ScheduleError(f"rank {rank} repeats {action}", rank, action)
    if so_far in ("", "F"):
        before = action._replace(kind="I" if action.kind == "W" else "F")
        why = f"without {before} before it"
    else:
        why = f"after {action._replace(kind=so_far[1])}: a backward is one B, or one I and one W"
    return ScheduleError(f"rank {rank} runs {action} {why}", rank, action)


def _check_complete(schedule, stage, done):
    rank = schedule.placement[stage]
    for microbatch in range(schedule.microbatches):
        so_far = done.get(microbatch, "")
        if so_far in ("FB", "FIW"):
            continue
        action = Action(stage, {"": "F", "F": "B", "FI": "W"}[so_far], microbatch)
        if microbatch == len(done) and not so_far:
            raise ScheduleError(
                f"stages disagree on the number of micro-batches: stage {stage} has {len(done)}, "
                f"another has {schedule.microbatches}; rank {rank} lacks {action}",
                rank,
                action,
            )
        raise ScheduleError(f"rank {rank} forgets {action}", rank, action)


def channels(schedule: Schedule) -> dict[Channel, tuple[Message, ...]]:
    """Return the messages on each channel, in their order.

    Messages on a channel match by order and carry no tag, so both ends must process them in the
    same order. The sender's order is that of the actions that produce them; the receiver's order is
    that of the actions that need them.

    Raises:
        ScheduleError: If the two orders differ.
    """
    given, needed = {}, {}  # by channel: its messages, in the order of each end
    for row in schedule:
        for action in row:
            for message, end in ((schedule.needs(action), needed), (schedule.gives(action), given)):
                channel = message and schedule.channel(message)
                if channel:
                    end.setdefault(channel, []).append(message)
    for channel in given | needed:
        ends = given.get(channel, []), needed.get(channel, [])
        if ends[0] != ends[1]:
            raise _disagreement(schedule, channel, *ends)
    return {channel: tuple(messages) for channel, messages in given.items()}


def _disagreement(schedule, channel, given, needed):
    sender, receiver, kind = channel
    message, wanted = next(pair for pair in zip_longest(given, needed) if pair[0] != pair[1])
    giver = next((a for a in schedule[sender] if message and schedule.gives(a) == message), None)
    taker = next((a for a in schedule[receiver] if wanted and schedule.needs(a) == wanted), None)
    return ScheduleError(
        f"rank {sender} and rank {receiver} disagree on the order of {kind}s: rank {sender} sends "
        f"that of {giver or 'nothing'} where rank {receiver} expects that for {taker or 'nothing'}",
        receiver,
        taker,
    )


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield every (rank, action), each after what it needs: an order for one process to run them.

    The running time is linear in the number of actions.

    Raises:
        ScheduleError: If there is no such order; the message names which rank waits for which.
    """
    for rank, unit in units_in_order(schedule):
        for action in unit:
            yield rank, action


def units_in_order(schedule: Schedule) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """Yield (rank, unit) as `in_order` yields (rank, action); a unit is an action or a pair.

    A pair comes after what both of its actions need.
    """
    there, waiting = set(), {}  # messages produced so far; message -> the rank that waits for it
    position, ready = [0] * len(schedule), list(range(len(schedule)))
    while ready:
        rank = ready.pop()
        row = schedule.units[rank]
        while position[rank] < len(row):
            unit = row[position[rank]]
            missing = next((m for m in map(schedule.needs, unit) if m and m not in there), None)
            if missing:
                waiting[missing] = rank
                break
            yield rank, unit
            position[rank] += 1
            for given in map(schedule.gives, unit):
                there.add(given)
                if given in waiting:
                    ready.append(waiting.pop(given))
    if waiting:
        raise _deadlock(schedule, {rank: message for message, rank in waiting.items()}, position)


def _deadlock(schedule, waiting, position):
    """Return the error for ranks that wait, each for `waiting[rank]` at `position[rank]`."""
    rank, path = min(waiting), []
    while rank in waiting and rank not in path:
        path.append(rank)
        rank = schedule.placement[waiting[rank].from_stage]
    if rank in path:  # else the last rank on the path waits for a rank that has ended
        path = path[path.index(rank) :]
    links = []
    for rank in path:
        message, at = waiting[rank], name_of(schedule.units[rank][position[rank]])
        giver = schedule.placement[message.from_stage]
        later = chain.from_iterable(schedule.units[giver][position[giver] :])
        action = next((action for action in later if schedule.gives(action) == message), None)
        what = f"{action} of rank {giver}" if action else "a message that never comes"
        links.append(f"rank {rank} waits at {at} for {what}")
    stuck = schedule.units[path[0]][position[path[0]]]
    culprit = next(action for action in stuck if schedule.needs(action) == waiting[path[0]])
    return ScheduleError("deadlock: " + ", ".join(links), path[0], culprit)
