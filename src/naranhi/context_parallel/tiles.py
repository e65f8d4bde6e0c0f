"""The tiles that a mask leaves of (queries, keys): rectangles, each full or causal.

No mask tensor of (queries, keys) is built. A causal mask and consecutive documents leave
rectangles, which the fused attention takes as they are; masked tiles are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import NamedTuple

from naranhi.context_parallel.order import Run

# The lengths of the documents: one list for all rows, or one list for each row.
Documents = Sequence[int] | Sequence[Sequence[int]]


class Tile(NamedTuple):
    """Queries and the keys that each of them sees; with `causal`, only up to its own position."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def spans(
    documents: Documents | None, rows: int, length: int
) -> list[tuple[slice, list[tuple[int, int]]]]:
    """Return [(rows, [(begin, end) of each document])]; for None, one document.

    Raises:
        ValueError: the documents are neither lengths nor lists of lengths; those of a row are not
            positive or do not sum to the length of the whole sequence; or the number of lists
            is not `rows`.
    """
    documents = [length] if documents is None else documents
    if not _are_lengths(documents):
        raise ValueError(
            "documents must be a list of lengths (whole numbers, not a tensor), such as [5, 3], or "
            f"one such list for each row, not {documents!r}"
        )
    documents = list(documents)
    if all(isinstance(count, Integral) for count in documents):
        return [(slice(None), _ends(documents, length))]
    if len(documents) != rows:
        raise ValueError(f"documents of {len(documents)} rows for a batch of {rows}")
    return [
        (slice(row, row + 1), _ends(list(counts), length)) for row, counts in enumerate(documents)
    ]


def _are_lengths(documents, of_rows=True):
    if not isinstance(documents, Sequence) or isinstance(documents, str):
        return False
    if all(isinstance(count, Integral) for count in documents):
        return True
    return of_rows and all(_are_lengths(counts, False) for counts in documents)


def _ends(counts, length):
    if sum(counts) != length or min(counts) < 1:
        raise ValueError(
            f"document lengths must be at least 1 and sum to {length}, the sequence's, not {counts}"
        )
    return list(pairwise(accumulate(counts, initial=0)))


def tiles(
    queries: Sequence[Run],
    keys: Sequence[Run],
    causal: bool,
    documents: Sequence[tuple[slice, Sequence[tuple[int, int]]]],
) -> list[Tile]:
    """Return the tiles that the mask leaves of these queries and keys, by tensor index.

    Args:
        queries: where the queries are in the whole sequence.
        keys: where the keys are.
        causal: whether a query sees no key after its own position.
        documents: what `spans` returns; a query sees the keys of its own document.
    """
    found: list[Tile] = []

    def add(rows, query, q, key, k, triangle=False):
        """Add the tile of positions q and k, joined to the last tile if that is possible."""
        if q[0] >= q[1] or k[0] >= k[1]:
            return
        tile = Tile(rows, _indices(query, q), _indices(key, k), triangle)
        while found and (joined := _joined(found[-1], tile)):
            found.pop()
            tile = joined
        found.append(tile)

    for rows, documents_of_rows in documents:
        for begin, end in documents_of_rows:
            for query in queries:
                q = _within(query, begin, end)
                for key in keys:
                    k = _within(key, begin, end)
                    if not causal:
                        add(rows, query, q, key, k)
                        continue
                    same = max(q[0], k[0]), min(q[1], k[1])
                    add(rows, query, q, key, (k[0], min(k[1], q[0])))
                    add(rows, query, same, key, same, True)
                    add(rows, query, (same[1], q[1]), key, same)
    return found


def _within(run, begin, end):
    return max(begin, run.start), min(end, run.start + run.length)


def _indices(run, positions):
    return slice(*(position - run.start + run.offset for position in positions))


def _joined(first, second):
    """Return two rectangles side by side as one; None if they are not."""
    if first.rows != second.rows or first.causal or second.causal:
        return None
    (q, k), (other_q, other_k) = first[1:3], second[1:3]
    if q == other_q and k.stop == other_k.start:
        return first._replace(keys=slice(k.start, other_k.stop))
    if k == other_k and q.stop == other_q.start:
        return first._replace(queries=slice(q.start, other_q.stop))
    return None
