"""Schedules of the tests' own: orders, splits, placements and versions that GPipe does not have."""

from naranhi.schedules import Action, Schedule


def one_f_one_b(stages, microbatches, split=False):
    """Forwards until the first gradient comes, then in turn; with split, I and W in place of B."""
    return Schedule(_one_f_one_b_row(stage, stages, microbatches, split) for stage in range(stages))


def _one_f_one_b_row(stage, stages, microbatches, split=False):
    ahead = min(stages - stage, microbatches)
    row = [Action(stage, "F", k) for k in range(ahead)]
    for k in range(microbatches):
        row += [Action(stage, kind, k) for kind in ("IW" if split else "B")]
        row += [Action(stage, "F", k + ahead)] if k + ahead < microbatches else []
    return row


def late_weights(stages, microbatches):
    """GPipe with a split backward: the gradients of the weights only when all others are done."""
    return Schedule(
        [Action(stage, kind, k) for kind in "FIW" for k in range(microbatches)]
        for stage in range(stages)
    )


def looped(stages, microbatches, chunks):
    """Virtual stage s on rank s mod stages; all forwards stage by stage, then all backwards."""
    return Schedule(
        [Action(c * stages + rank, "F", k) for c in range(chunks) for k in range(microbatches)]
        + [
            Action(c * stages + rank, "B", k)
            for c in reversed(range(chunks))
            for k in range(microbatches)
        ]
        for rank in range(stages)
    )


def there_and_back(stages, microbatches):
    """Two virtual stages on each rank in the shape of a V: the last rank hands over to itself."""
    rows = []
    for rank in range(stages):
        down, up = rank, 2 * stages - 1 - rank
        rows.append([Action(stage, "F", k) for k in range(microbatches) for stage in (down, up)])
        rows[-1] += [Action(stage, "B", k) for k in range(microbatches) for stage in (up, down)]
    return Schedule(rows)


def without_flush(stages, microbatches):
    """One forward, one backward, and an update after every backward, as in PipeDream."""
    rows = []
    for stage in range(stages):
        row, newest = [], 0
        for action in _one_f_one_b_row(stage, stages, microbatches):
            if action.kind == "F":
                row.append(action._replace(version=newest))
            else:
                newest += 1
                row += [action, Action(stage, "U", None, newest)]
        rows.append(row)
    return Schedule(rows)


def one_version_behind(stages, microbatches, batches):
    """An update after each batch; a batch reads the version before the newest, as in 2BW."""
    rows = []
    for stage in range(stages):
        row = []
        for action in _one_f_one_b_row(stage, stages, microbatches * batches):
            batch, place = divmod(action.microbatch, microbatches)
            if action.kind == "F":
                row.append(action._replace(version=max(0, batch - 1)))
            else:
                row.append(action)
                row += [Action(stage, "U", None, batch + 1)] * (place == microbatches - 1)
        rows.append(row)
    return Schedule(rows)
