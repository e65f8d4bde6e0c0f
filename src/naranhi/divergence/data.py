"""The first phase: does every row of the batch go through the model, and only once?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

import torch

from naranhi.divergence.axes import ROWS, Axes
from naranhi.divergence.recorder import Recorder
from naranhi.divergence.reference import Reference
from naranhi.divergence.report import Divergence

Rows = list[list[int | None]]  # of each micro-batch, the rows of the whole batch; None: not there


def rows_of(records: Recorder, reference: Reference, axes: Axes) -> Rows | None:
    """Return which rows of the batch this rank's first layer took, found by what they contain.

    Rows that are equal count in their order. None if this rank does not run the first layer.
    """
    if not records.inputs:
        return None
    known, used, result = {}, Counter(), []
    wholes = [
        _columns(axes, own.shape[1:], whole)
        for whole, own in zip(reference.inputs, records.inputs[0], strict=True)
    ]
    for row, digest in enumerate(_digests(wholes)):
        known.setdefault(digest, []).append(row)
    for tensors in records.inputs:
        rows = []
        for digest in _digests(tensors):
            places = known.get(digest)
            rows.append(places[used[digest] % len(places)] if places else None)
            used[digest] += 1
        result.append(rows)
    return result


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
    """Return how the batch was divided wrongly over the ranks, or None.

    Args:
        rows: of each rank, what `rows_of` returned there.
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
    twice = {row: ranks for row, ranks in users.items() if len(ranks) > 1}
    never = [row for row in range(reference.rows) if row not in users]
    if twice:
        row, ranks = min(twice.items())
        who = " and ".join(map(axes.where, ranks))
        what = f"{len(twice)} of {reference.rows} rows are taken twice: row {row} by {who}"
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
