"""Check the actions of ZeRO in a schedule: what runs is gathered, what is computed is reduced."""

from naranhi.schedules.schedule import SHARDING, Schedule, ScheduleError


def check_sharding(schedule: Schedule) -> None:
    """Raise ScheduleError unless stages are gathered where they run and gradients are reduced.

    If any stage is gathered by an action, every stage must be gathered whenever it runs, also for a
    W, and freed in the end. If a schedule has any action of ZeRO, every gradient must be reduced,
    once, and no reduction may come without a gradient.
    """
    kinds = {action.kind for row in schedule for action in row}
    if not kinds & set(SHARDING):
        return
    for rank, row in enumerate(schedule):
        if "U" in kinds:
            first = next((action for action in row if action.kind in ("U", *SHARDING)), None)
            why = "ZeRO's actions and updates do not go together: a stage is updated after the step"
            raise ScheduleError(f"rank {rank} runs {first}: {why}", rank, first)
        _check_row(rank, row, bool(kinds & {"UNSHARD", "RESHARD"}))


def _check_row(rank, row, sharded):
    whole, freed, unreduced = {}, {}, {}  # by stage: the UNSHARD; the RESHARD; the last backward

    def wrong(action, why):
        return ScheduleError(f"rank {rank} runs {action} {why}", rank, action)

    for action in row:
        stage, kind = action.stage, action.kind
        if kind == "UNSHARD":
            if stage in whole:
                raise wrong(action, f"where stage {stage} is gathered already")
            whole[stage] = action
        elif kind == "RESHARD":
            if stage not in whole:
                raise wrong(action, f"where stage {stage} is not gathered")
            freed[stage] = action
            del whole[stage]
        elif kind == "REDUCE_GRAD":
            if not unreduced.pop(stage, None):
                raise wrong(action, "without a backward since the last reduction")
        elif sharded and stage not in whole:
            due = action._replace(kind="UNSHARD", microbatch=None, version=0)
            before = f"after {freed[stage]} and " if stage in freed else ""
            raise wrong(action, f"{before}without {due} before it: stage {stage} is in shards")
        if kind in ("B", "W"):
            unreduced[stage] = action
    for action in unreduced.values():
        due = action._replace(kind="REDUCE_GRAD", microbatch=None)
        raise wrong(action, f"and never reduces its gradient: no {due} follows")
    for stage, action in whole.items():
        due = action._replace(kind="RESHARD")
        raise wrong(action, f"and never frees stage {stage}: no {due} follows")
