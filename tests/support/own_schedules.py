"""Schedules of the tests' own: orders, splits and placements that the package's do not have."""

from naranhi.schedules import Action, Schedule


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
