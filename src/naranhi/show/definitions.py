"""Define each collective on lists of blocks; the pictures are computed from these definitions.

A function takes what every rank holds, in rank order, and returns what every rank holds
afterwards. Each rank holds a list of blocks, which is empty where the collective has no input or
output on that rank. A block is anything that can be added: numbers, tensors, or a `Block`, which
remembers what was added into it.

Nothing here sends a message. `naranhi.collectives` shows how these results are computed. Only the
ring and the tree are also played here, step by step, for the pictures.
"""

from __future__ import annotations

import string
from functools import reduce as fold
from operator import add
from typing import Any, NamedTuple


class Block(NamedTuple):
    """A named block of data: `terms` are its (position, rank) pairs; that of A0 is (0, 0)."""

    terms: tuple[tuple[int, int], ...]

    def __add__(self, other: Block) -> Block:
        return Block(tuple(sorted(self.terms + other.terms)))

    def __str__(self) -> str:
        return "+".join(f"{string.ascii_uppercase[at]}{rank}" for at, rank in self.terms)


def block(position: int, rank: int) -> Block:
    """Return the block at a position (0 is A) of the data that a rank began with."""
    return Block(((position, rank),))


def broadcast(held: list[list[Any]], root: int = 0) -> list[list[Any]]:
    """Send the root's blocks to every rank."""
    return [held[root] for _ in held]


def scatter(held: list[list[Any]], root: int = 0) -> list[list[Any]]:
    """Send block i of the root to rank i."""
    return [[block] for block in held[root]]


def gather(held: list[list[Any]], root: int = 0) -> list[list[Any]]:
    """Send every rank's block to the root."""
    everything = [block for [block] in held]
    return [everything if rank == root else [] for rank in range(len(held))]


def reduce(held: list[list[Any]], root: int = 0) -> list[list[Any]]:
    """Add the blocks of all ranks, position by position, on the root; others keep theirs."""
    sums = [fold(add, column) for column in zip(*held, strict=True)]
    return [sums if rank == root else blocks for rank, blocks in enumerate(held)]


def all_gather(held: list[list[Any]]) -> list[list[Any]]:
    """Send every rank's block to every rank."""
    return [[block for [block] in held] for _ in held]


def reduce_scatter(held: list[list[Any]]) -> list[list[Any]]:
    """Add the blocks of all ranks, position by position; rank i gets sum i."""
    return [[fold(add, column)] for column in zip(*held, strict=True)]


def all_reduce(held: list[list[Any]]) -> list[list[Any]]:
    """Add the blocks of all ranks, position by position, on every rank."""
    return all_gather(reduce_scatter(held))


def all_to_all(held: list[list[Any]]) -> list[list[Any]]:
    """Send block i of every rank to rank i."""
    return [list(column) for column in zip(*held, strict=True)]


COLLECTIVES = {
    function.__name__: function
    for function in (
        broadcast,
        scatter,
        gather,
        reduce,
        all_gather,
        reduce_scatter,
        all_reduce,
        all_to_all,
    )
}


def example(name: str, ranks: int, root: int = 0) -> list[list[Block]]:
    """Return what the ranks hold before the named collective: whole tensors or a block each."""
    if name in ("gather", "all_gather"):
        return [[block(0, rank)] for rank in range(ranks)]
    rooted = name in ("broadcast", "scatter")
    return [
        [block(at, rank) for at in range(ranks)] if rank == root or not rooted else []
        for rank in range(ranks)
    ]


class Step(NamedTuple):
    """The state after a ring step: `held[rank][position]`, and the position each rank received."""

    phase: str
    held: list[list[Block]]
    received: list[int | None]


def ring(held: list[list[Any]]) -> list[Step]:
    """Return the steps of a ring all-reduce, the start first: reduce-scatter, then all-gather.

    In each step every rank sends one block to the rank on its right. Block i starts at rank i + 1.
    On its way round each rank adds its own block i, and the sum is complete at rank i. Then the
    block goes round again, and each rank keeps a copy.
    """
    ranks = len(held)
    steps = [Step("start", held, [None] * ranks)]
    for phase, start in (("reduce-scatter", -1), ("all-gather", 0)):
        for step in range(ranks - 1):
            before = steps[-1].held
            after = [list(blocks) for blocks in before]
            received = []
            for rank in range(ranks):
                left = (rank - 1) % ranks
                at = (left + start - step) % ranks  # the block that the left neighbour sends now
                arriving = before[left][at]
                after[rank][at] = arriving if start == 0 else arriving + before[rank][at]
                received.append(at)
            steps.append(Step(phase, after, received))
    return steps


def tree(ranks: int, root: int = 0) -> list[list[tuple[int, int]]]:
    """Return the rounds of a binomial broadcast: in each, the (sender, receiver) pairs.

    Each rank that has the data sends it on; the distance halves from round to round.
    """
    distances = [2**i for i in range((ranks - 1).bit_length())]
    have, rounds = [0], []
    for distance in reversed(distances):
        pairs = [(place, place + distance) for place in have if place + distance < ranks]
        have += [receiver for _, receiver in pairs]
        rounds.append([((a + root) % ranks, (b + root) % ranks) for a, b in pairs])
    return rounds
