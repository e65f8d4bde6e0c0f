"""The ring: every rank sends to its right neighbour only, the fewest bytes in many messages.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009).
"""

import torch

from naranhi.collectives.chunks import finish, start


def all_gather(blocks, group, rank, ranks):
    """Begin with block `rank` in place; pass on to the right what last came from the left."""
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    for step in range(ranks - 1):
        leaving, arriving = blocks[(rank - step) % ranks], blocks[(rank - step - 1) % ranks]
        works = start(group, sends=[(leaving, right)], receives=[(arriving, left)])
        yield
        finish(works)


def reduce_scatter(blocks, output, group, rank, ranks):
    """Block i starts at rank i + 1, collects a sum at each rank, and ends complete at rank i.

    It ends in `output`, and `blocks` stay as they are; if `output` is None, sums replace blocks.
    """
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    leaving = blocks[left]
    for step in range(2, ranks + 1):
        own = blocks[(rank - step) % ranks]
        arriving = torch.empty_like(own)
        works = start(group, sends=[(leaving, right)], receives=[(arriving, left)])
        yield
        finish(works)
        total = own if output is None else output if step == ranks else arriving
        leaving = torch.add(arriving, own, out=total)


def all_reduce(data, group, rank, ranks):
    """All-reduce is reduce-scatter, then all-gather."""
    blocks = data.tensor_split(ranks)
    yield from reduce_scatter(blocks, None, group, rank, ranks)
    yield from all_gather(blocks, group, rank, ranks)
