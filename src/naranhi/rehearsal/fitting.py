"""Measure what a layer, a message and an action cost here, as a `planning.Machine`."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from naranhi import schedules
from naranhi.collectives import chunks
from naranhi.costs import fit_alpha_beta
from naranhi.pipeline import Pipeline
from naranhi.planning import Layer, Line, Machine, Model
from naranhi.rehearsal.layers import Pace, RehearsalLayer
from naranhi.rehearsal.meshes import Groups
from naranhi.rehearsal.network import Network, meet, slowest
from naranhi.rehearsal.steps import squares

PARTS = 1 / 8, 1.0  # fractions of a layer, whose times give a line
MESSAGES = 15  # of each size, one after the other
SIZES = 2**12, 2**18  # bytes of messages, whose times give a line


def fit(
    model: Model, sequence_length: int, *, pace: Pace, network: Network, repeats: int = 7
) -> Machine:
    """Measure this machine with all ranks at once, and return it for `predict`.

    No mesh is run, only a layer on each rank by itself, messages between pairs, and a pipeline of
    one stage. The fastest time of a layer counts, because anything else that runs only adds time.

    Args:
        model: The model whose layers are to be cut.
        sequence_length: Tokens of a sequence.
        pace: The pace of a whole layer.
        network: The links within and between the two halves of the ranks.
        repeats: How often a layer is timed.
    """
    ranks = dist.get_world_size()
    alone = _alone()
    passes = [_layer(model, sequence_length, alone, pace, part, repeats) for part in PARTS]
    forward, backward = (_line(PARTS, times) for times in zip(*passes, strict=True))
    whole = passes[-1][0] + passes[-1][1]
    action = _step(model, sequence_length, alone, pace, repeats) / 2 - whole / 2
    everyone = dist.new_group(group_desc="unchecked")
    with network.paced():
        far, near = (
            _line(SIZES, [_message(size, peer, everyone) for size in SIZES])
            for peer in peers(dist.get_rank(), ranks)
        )
    dist.destroy_process_group(everyone)
    dist.destroy_process_group(alone.tensor)
    return Machine(
        ranks,
        max(1, ranks // 2),
        layer=Layer(forward, backward, pace.attention),
        near=near,
        far=far,
        action=max(0.0, action),
        peak=model.flops_per_token(sequence_length) * sequence_length / whole / model.layers,
    )


def _alone():
    group = [
        dist.new_group([rank], group_desc="unchecked") for rank in range(dist.get_world_size())
    ]
    return Groups(*[group[dist.get_rank()]] * 4)


def _layer(model, sequence_length, groups, pace, part, repeats):
    """Return the seconds of the forward and the backward of a fraction `part` of a layer."""
    slower = Pace(pace.forward * part, pace.backward * part, pace.attention)
    layer = RehearsalLayer(model.hidden, model.heads, groups, pace=slower)
    x = torch.randn(1, sequence_length, model.hidden, requires_grad=True)
    times = []
    meet()
    for _ in range(1 + repeats):  # the first, left out below, makes device handles
        start = perf_counter()
        output = layer(x)
        middle = perf_counter()
        output.sum().backward()
        times.append((middle - start, perf_counter() - middle))
    return [_fastest(one) for one in zip(*times[1:], strict=True)]


def _step(model, sequence_length, groups, pace, repeats):
    """Return the seconds of a micro-batch of a pipeline that has one stage of one layer."""
    layer = RehearsalLayer(model.hidden, model.heads, groups, pace=pace)
    x = torch.randn(repeats, sequence_length, model.hidden)
    schedule = schedules.one_f_one_b(1, repeats)
    with Pipeline([layer], schedule, squares, group=groups.pipeline) as pipeline:
        times = []
        for _ in range(3):
            meet()
            start = perf_counter()
            pipeline.step(x, torch.zeros_like(x), x.numel())
            times.append((perf_counter() - start) / repeats)
    return _fastest(times)


def peers(rank: int, ranks: int) -> tuple[int, int | None]:
    """Return with whom a rank exchanges messages across the halves, and within its half.

    In a half of odd size, the last rank has no peer within it: None. With two ranks, both peers are
    the other rank, over the slow link.
    """
    half = ranks // 2
    far = (rank + half) % ranks
    if half < 2:
        return far, far
    first = rank // half * half
    near = first + ((rank - first) ^ 1)
    return far, near if near < first + half else None


def _message(size, peer, group):
    """Return the seconds of a message, while all ranks that have a peer exchange messages.

    This is the median over successive messages, on the rank whose messages take longest, because
    ranks may share a link.
    """
    sent, received, times = torch.zeros(size // 4), torch.empty(size // 4), []
    dist.barrier(group)
    for _ in range(MESSAGES if peer is not None else 0):
        start = perf_counter()
        chunks.finish(chunks.start(group, sends=[(sent, peer)], receives=[(received, peer)]))
        times.append(perf_counter() - start)
    return slowest([median(times) if times else 0.0])[0]


def _line(sizes, seconds):
    start, rate = fit_alpha_beta(sizes, seconds)
    return Line(max(0.0, start), max(0.0, rate))


def _fastest(times):
    """Return the fastest time of any rank: layers are equal."""
    least = torch.tensor(min(times), dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.item()
