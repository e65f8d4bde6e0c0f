"""What each collective does, on lists of blocks: the pictures are computed from these.

A function takes what every rank holds, in rank order, and returns what every rank then holds;
each holds a list of blocks, which is empty where a collective gives or wants nothing. A block is
anything that can be added: numbers do, tensors do, and a `Block` remembers what went into it.
Nothing here sends a message. How these results come about is the matter of `naranhi.collectives`;
only the ring and the tree are played here too, step by step, to be looked at.
"""

import string
from functools import reduce as fold
from operator import add
from typing import NamedTuple


class Block(NamedTuple):
    """A block of data by name: `terms` are its (position, rank) pairs, A0 being (0, 0)."""

    terms: tuple[tuple[int, int], ...]

    def __add__(self, other):
        return Block(tuple(sorted(self.terms + other.terms)))

    def __str__(self):
        return "+".join(f"{string.ascii_uppercase[at]}{rank}" for at, rank in self.terms)


def block(position, rank):
    """The block at a position, 0 being A, of the data that a rank began with."""
    return Block(((position, rank),))


def broadcast(held, root=0):
    return [held[root] for _ in held]


def scatter(held, root=0):
    return [[block] for block in held[root]]


def gather(held, root=0):
    everything = [block for [block] in held]
    return [everything if rank == root else [] for rank in range(len(held))]


def reduce(held, root=0):
    sums = [fold(add, column) for column in zip(*held, strict=True)]
    return [sums if rank == root else blocks for rank, blocks in enumerate(held)]


def all_gather(held):
    return [[block for [block] in held] for _ in held]


def reduce_scatter(held):
    return [[fold(add, column)] for column in zip(*held, strict=True)]


def all_reduce(held):
    return all_gather(reduce_scatter(held))


def all_to_all(held):
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


def example(name, ranks, root=0):
    """What the ranks hold before the collective of that name: whole tensors or a block each."""
    if name in ("gather", "all_gather"):
        return [[block(0, rank)] for rank in range(ranks)]
    rooted = name in ("broadcast", "scatter")
    return [
        [block(at, rank) for at in range(ranks)] if rank == root or not rooted else []
        for rank in range(ranks)
    ]


class Step(NamedTuple):
    """`held[rank][position]` after a step of the ring, and the position each rank received."""

    phase: str
    held: list[list[Block]]
    received: list[int | None]


def ring(held):
    """The steps of a ring all-reduce, the start first: reduce-scatter, then all-gather.

    In each step every rank sends one block to the rank on its right. Block i starts at rank i + 1,
    grows by each rank's own on its way round and is complete at rank i; then it goes round again,
    and each rank keeps a copy.
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


def tree(ranks, root=0):
    """The rounds of a binomial broadcast: in each, the (sender, receiver) pairs.

    The ranks that have the data each pass it on; the distance halves from round to round.
    """
    distances = [2**i for i in range((ranks - 1).bit_length())]
    have, rounds = [0], []
    for distance in reversed(distances):
        pairs = [(place, place + distance) for place in have if place + distance < ranks]
        have += [receiver for _, receiver in pairs]
        rounds.append([((a + root) % ranks, (b + root) % ranks) for a, b in pairs])
    return rounds
