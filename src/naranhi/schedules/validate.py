"""What makes a schedule right: complete, in order, free of deadlock. And what follows from it.

The time that each function here takes grows with the number of actions, and no faster.
"""

from itertools import zip_longest

from naranhi.schedules.schedule import Action, ScheduleError


def check(schedule):
    """Return if a schedule is complete, ordered and free of deadlock, else raise ScheduleError.

    Complete: every virtual stage is on one rank and runs, for every micro-batch, one F and either
    one B or one I and one W. Ordered: F before B or I, I before W; updates make one version after
    the other, each has gradients to apply and none is left over; a forward reads a version that is
    there. Free of deadlock: `channels` agrees on the order of messages, and `in_order` finds an
    order of all actions. The time it takes grows with the number of actions.

    Why nothing can block then. Let every rank start a send when the action that gives the message
    ends, without waiting for it, and keep the next receive of each channel posted, in the channel's
    order. Both ends of a channel go through the same messages in the same order, so the oldest
    message not yet received is the next one that the receiver needs, and a receive awaits it. Hence
    a rank waits only for actions of others, and in the order that was found, the first action
    that is not done waits for none.
    """
    if not len(schedule):
        raise ScheduleError("a schedule has at least one rank")
    updates = any(action.kind == "U" for row in schedule for action in row)
    done = [{} for _ in schedule.placement]  # by stage: micro-batch -> its kinds so far, as "FI"
    for rank, row in enumerate(schedule):
        made, unapplied = {}, {}  # by stage: its newest version; the last gradient not yet applied
        for action in row:
            stage, kind, microbatch, version = action
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
    for stage, of_stage in enumerate(done):
        _check_complete(schedule, stage, of_stage)
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


def channels(schedule):
    """The messages on each channel, in their order: ``{Channel: tuple of Messages}``.

    Messages on a channel match by order and carry no tag, so both ends must go through them in the
    same order: the sender in that of the actions that give them, the receiver in that of the
    actions that need them. ScheduleError where the two differ.
    """
    given, needed = {}, {}  # by channel: its messages as each end goes through them
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


def in_order(schedule):
    """Every (rank, action), none before what it needs: an order for one process to do it all.

    A generator; the time it takes grows with the number of actions. Raises ScheduleError, naming
    who waits for whom, where there is no such order.
    """
    there, waiting = set(), {}  # messages given so far; message -> the rank that waits for it
    position, ready = [0] * len(schedule), list(range(len(schedule)))
    while ready:
        rank = ready.pop()
        row = schedule[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            needed, given = schedule.needs(action), schedule.gives(action)
            if needed and needed not in there:
                waiting[needed] = rank
                break
            yield rank, action
            position[rank] += 1
            there.add(given)
            if given in waiting:
                ready.append(waiting.pop(given))
    if waiting:
        raise _deadlock(schedule, {rank: message for message, rank in waiting.items()}, position)


def _deadlock(schedule, waiting, position):
    """The error for ranks that wait, each for the message `waiting[rank]` at its position."""
    rank, path = min(waiting), []
    while rank in waiting and rank not in path:
        path.append(rank)
        rank = schedule.placement[waiting[rank].from_stage]
    if rank in path:  # else the last on the path waits for one that has ended
        path = path[path.index(rank) :]
    told = []
    for rank in path:
        message = waiting[rank]
        giver = schedule.placement[message.from_stage]
        later = schedule[giver][position[giver] :]
        action = next((action for action in later if schedule.gives(action) == message), None)
        what = f"{action} of rank {giver}" if action else "a message that never comes"
        told.append(f"rank {rank} waits at {schedule[rank][position[rank]]} for {what}")
    culprit = schedule[path[0]][position[path[0]]]
    return ScheduleError("deadlock: " + ", ".join(told), path[0], culprit)
