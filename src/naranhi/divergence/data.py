"""The first phase: does every row of the batch go through the model, and only once?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

import torch

from naranhi.divergence.axes import ROWS, Axes, Part
from naranhi.divergence.classify import distance
from naranhi.divergence.recorder import Recorder
from naranhi.divergence.reference import Reference
from naranhi.divergence.report import Divergence

Rows = list[list[int | None]]  # per micro-batch, indices of rows of the batch; None: not in it
Candidates = list[list[tuple[int, ...]]]  # the same, with all rows of the batch that are equal


def rows_of(records: Recorder, reference: Reference, axes: Axes) -> Candidates | None:
    """Return which rows of the batch this rank's first layer took, identified by their content.

    Each row comes as a tuple of all rows of the batch that are equal to it; `numbered` chooses one.
    None if this rank does not run the first layer.
    """
    if not records.inputs:
        return None
    if any(len(taken) <= max(reference.inputs) for taken in records.inputs):
        raise ValueError(
            f"{reference.first or 'the model'} takes fewer tensors here than in one process; "
            "pass the same ones"
        )
    wholes = {  # not a mask that has as many rows as one process's batch by chance
        place: _columns(axes, records.inputs[0][place].shape[1:], whole)
        for place, whole in reference.inputs.items()
        if all(len(taken[place]) == len(taken[0]) for taken in records.inputs)
    }
    known = _by_content(list(wholes.values()))
    return [
        [tuple(known.get(digest, ())) for digest in _digests([taken[place] for place in wholes])]
        for taken in records.inputs
    ]


def equal_rows(reference: Reference) -> dict[int, list[int]]:
    """Return {row: itself and the rows that are equal to it}, of the rows that are not unique."""
    known = _by_content(list(reference.inputs.values()))
    return {row: rows for rows in known.values() if len(rows) > 1 for row in rows}


def numbered(candidates: Sequence[Candidates | None], axes: Axes) -> list[Rows | None]:
    """Return which rows of the batch each rank takes, with one index for each of equal rows.

    Equal rows are numbered over the ranks that share the batch, in the order of their coordinates,
    and on a rank in its own order. So each is taken once, unless there are too few of them.

    Args:
        candidates: for each rank, the result of `rows_of` there.
        axes: where the ranks are on the mesh.
    """
    rows: list[Rows | None] = [None] * len(candidates)
    candidates = _narrowed(candidates, axes)
    for line in axes.neighbours(*ROWS):
        used = Counter()
        for rank in sorted(line, key=lambda rank: [axes.places[rank].get(axis) for axis in ROWS]):
            if candidates[rank] is not None:
                rows[rank] = [[_next(equal, used) for equal in taken] for taken in candidates[rank]]
    return rows


def _next(equal, used):
    """Return the next of some equal rows, and the first again after the last."""
    used[equal] += 1
    return equal[(used[equal] - 1) % len(equal)] if equal else None


def _narrowed(candidates, axes):
    """Return only the candidates shared by all ranks that must take the same rows.

    Where sequences are split, a rank sees parts of rows, and different rows may have equal parts.
    """
    narrowed = list(candidates)
    for line in axes.neighbours(*(axis for axis in axes.sizes if axis not in ROWS)):
        shares = [candidates[rank] for rank in line if candidates[rank] is not None]
        if len({tuple(map(len, share)) for share in shares}) > 1:
            continue  # `wrong_rows` reports it
        for rank in line:
            if candidates[rank] is not None:
                narrowed[rank] = [
                    [
                        tuple(row for row in own if all(row in other for other in others)) or own
                        for own, *others in zip(taken, *same, strict=True)
                    ]
                    for taken, *same in zip(candidates[rank], *shares, strict=True)
                ]
    return narrowed


def _by_content(wholes):
    """Return {digest: rows}."""
    known = {}
    for row, digest in enumerate(_digests(wholes)):
        known.setdefault(digest, []).append(row)
    return known


def _columns(axes, shape, whole):
    """Return the whole batch as this rank has it: with sequences split, its part of each row."""
    rows = torch.empty((len(whole), *shape), device="meta")
    return axes.part_of_output(rows, whole.shape, range(len(whole)), len(whole)).cut(whole)


def _digests(tensors: Sequence[torch.Tensor]):
    for row in zip(*tensors, strict=True):
        digest = sha256()
        for values in row:
            digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy())
        yield digest.digest()


def wrong_rows(rows: Sequence[Rows | None], reference: Reference, axes: Axes) -> Divergence | None:
    """Return the first error in how the batch is divided over the ranks, or None.

    Args:
        rows: for each rank, its rows, as `numbered` returns them.
        reference: one process's step.
        axes: where the ranks are on the mesh.
    """
    readers = [rank for rank, own in enumerate(rows) if own is not None]

    def report(ranks, axis, what, microbatch=0):
        return Divergence("data", reference.first, microbatch, tuple(ranks), axis, what)

    data = next((axis for axis in ROWS if axis in axes.sizes), None)
    for rank in readers:
        for microbatch, taken in enumerate(rows[rank]):
            if None in taken:
                place = f"row {taken.index(None)} of {axes.where(rank)} is not in the batch"
                return report([rank], data, place, microbatch)
    for axis in axes.sizes:
        for line in axes.neighbours(axis) if axis not in ROWS else ():
            line = [rank for rank in line if rank in readers]
            for rank in line[1:]:
                if rows[rank] != rows[line[0]]:
                    what = f"{axes.where(rank)} takes other rows than {axes.where(line[0])}"
                    return report([rank], axis, f"{what}, and they must agree")
    users = {}
    for line in axes.neighbours(*ROWS) if data else [[readers[0]]]:
        line = [rank for rank in line if rank in readers]
        for rank in line:
            for row in (row for taken in rows[rank] for row in taken):
                users.setdefault(row, []).append(rank)
        if line:
            break  # the other lines take the same rows
    repeated = {row: ranks for row, ranks in users.items() if len(ranks) > 1}
    never = [row for row in range(reference.rows) if row not in users]
    if repeated:
        row, ranks = min(repeated.items())
        who = " and ".join(map(axes.where, ranks))
        count = f"{len(repeated)} of {reference.rows}"
        what = f"{count} rows are taken more than once: row {row} by {who}"
        return report(sorted(set(ranks)), data, f"{what}; {len(never)} rows by nobody")
    if never:
        what = f"{len(never)} of {reference.rows} rows are taken by nobody, the first is {never[0]}"
        return report(readers, data, what)
    return None


def shared_rows(rows: Sequence[Rows | None], axes: Axes, rank: int) -> Rows:
    """Return the rows of a rank's micro-batches: on a later stage, those of its first stage."""
    place = axes.places[rank]
    return next(
        own
        for own, other in zip(rows, axes.places, strict=True)
        if own is not None and all(other.get(axis) == place.get(axis) for axis in ROWS)
    )


def of_closest_rows(
    part: Part,
    part_of: Callable[[Sequence[int]], Part],
    rows: Sequence[int],
    equal: Mapping[int, Sequence[int]],
    whole: torch.Tensor,
    allowed: float,
) -> Part:
    """Return a gradient per row as the part of whichever equal rows it is closest to.

    Equal rows look the same, but their targets may differ, and so their gradients. A target that is
    used twice shows in the gradients of the parameters.

    Args:
        part: the gradient, as the part of `rows`.
        part_of: returns the gradient as the part of given rows.
        rows: the rows as they are numbered.
        equal: as `equal_rows` returns it.
        whole: one process's gradient.
        allowed: how far the part may be from it.
    """
    errors, closest = _errors(part, whole), list(rows)
    if len(errors) != len(rows) or max(errors) <= allowed:
        return part
    for shift in range(1, max(len(equal.get(row, ())) for row in rows)):
        others = [_next_equal(equal.get(row, [row]), row, shift) for row in rows]
        for place, error in enumerate(_errors(part_of(others), whole)):
            if error < errors[place]:
                errors[place], closest[place] = error, others[place]
    return part._replace(cut=part_of(closest).cut)  # in the old slot, which other ranks share


def _errors(part, whole):
    return [distance(*pair) for pair in zip(part.value, part.cut(whole), strict=True)]


def _next_equal(equal, row, shift):
    return equal[(equal.index(row) + shift) % len(equal)]
