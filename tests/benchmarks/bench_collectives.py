"""Our collectives beside gloo's own.

The limit of a work: as many bytes as a rank of the ring sends, shifted from every rank to its right
neighbour and nothing else, that is, bytes on the wire over the bandwidth of the same links in use
all at once, measured in the same turns. All receives are posted before the first send, in messages
of `chunks.MESSAGE`: the best that point-to-point messages do.

Gloo is a weak peer where it moves more than it needs: its reduce-scatter is an all-reduce, and its
all-gather goes through memory of its own, which is fresh each time.
"""

from functools import partial

import torch
import torch.distributed as dist

from naranhi import collectives, costs
from naranhi.collectives import chunks
from tests.benchmarks.harness import Contenders, Work

SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "64 MiB": 2**26}

# Renamed in torch 2.13.
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def works():
    return [
        Work(f"{name.__name__}, {size}, {ranks} ranks", ranks, name, (bytes,))
        for ranks in (2, 4)
        for name in (all_reduce, all_gather, reduce_scatter)
        for size, bytes in SIZES.items()
    ]


def values(numel, seed):
    """Small whole numbers: sums are exact, also when results are summed again dozens of times."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, (numel,), generator=generator).float()


def all_reduce(group, bytes):
    own = values(bytes // 4, dist.get_rank(group))

    def in_place(collective):
        tensor = own.clone()

        def run():
            collective(tensor, group=group)
            return tensor

        return run

    make = {
        "naranhi": partial(in_place, collectives.all_reduce),
        "gloo": partial(in_place, dist.all_reduce),
    }
    return Contenders(make, limit=shift("all_reduce", bytes, group))


def all_gather(group, bytes):
    ranks = dist.get_world_size(group)
    block = values(bytes // 4 // ranks, dist.get_rank(group))
    ours, theirs = torch.empty(ranks, len(block)), torch.empty(ranks * len(block))

    def naranhi():
        collectives.all_gather(ours, block, group)
        return ours.view(-1)

    def gloo():
        torch_all_gather(theirs, block, group=group)
        return theirs

    make = {"naranhi": lambda: naranhi, "gloo": lambda: gloo}
    return Contenders(make, limit=shift("all_gather", bytes, group))


def reduce_scatter(group, bytes):
    ranks = dist.get_world_size(group)
    whole = values(bytes // 4, dist.get_rank(group))
    ours, theirs = torch.empty(len(whole) // ranks), torch.empty(len(whole) // ranks)

    def naranhi():
        collectives.reduce_scatter(ours, whole.view(ranks, -1), group)
        return ours

    def gloo():
        torch_reduce_scatter(theirs, whole, group=group)
        return theirs

    make = {"naranhi": lambda: naranhi, "gloo": lambda: gloo}
    return Contenders(make, limit=shift("reduce_scatter", bytes, group))


def shift(collective, bytes, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    moved = costs.bytes_sent(collective, bytes, ranks)
    leaving, arriving = torch.zeros(int(moved) // 4), torch.zeros(int(moved) // 4)
    message = chunks.MESSAGE // 4

    def run():
        works = [
            dist.irecv(part, group=group, group_src=(rank - 1) % ranks)
            for part in arriving.split(message)
        ]
        works += [
            dist.isend(part, group=group, group_dst=(rank + 1) % ranks)
            for part in leaving.split(message)
        ]
        for work in works:
            work.wait()

    return run
