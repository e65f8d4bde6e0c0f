"""Binomial trees: broadcast down, reduce up, in log2(ranks) steps of the whole tensor.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (2005).
"""

import torch

from naranhi.collectives.chunks import distances, finish, start


def broadcast(data, root, group, rank, ranks):
    """Copy the root's `data` to all ranks, from parent to children."""
    place = (rank - root) % ranks  # in the tree, whose root has place 0
    sent = []
    for distance in reversed(distances(ranks)):
        if place % (2 * distance) == distance:  # my parent has it by now, and I have nothing yet
            arriving = start(group, receives=[(data, (rank - distance) % ranks)])
            yield
            finish(arriving)
        elif place % (2 * distance) == 0 and place + distance < ranks:
            sent += start(group, sends=[(data, (rank + distance) % ranks)])
    yield
    finish(sent)


def reduce(total, root, group, rank, ranks):
    """Sum all ranks' `total` into the root's; the others' stay as they are."""
    place = (rank - root) % ranks
    for distance in distances(ranks):
        if place % (2 * distance) == distance:  # my subtree is complete: pass its sum up, and leave
            sent = start(group, sends=[(total, (rank - distance) % ranks)])
            yield
            finish(sent)
            return
        if place + distance < ranks:
            child = torch.empty_like(total)
            arriving = start(group, receives=[(child, (rank + distance) % ranks)])
            yield
            finish(arriving)
            total = torch.add(total, child, out=total if rank == root else child)
