"""Steps of a plan on paced ranks."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import nn

from naranhi import schedules
from naranhi.models import Paced
from naranhi.pipeline import Pipeline
from naranhi.planning import Model, Plan, PlanError
from naranhi.rehearsal.layers import Pace, RehearsalLayer
from naranhi.rehearsal.meshes import Groups
from naranhi.rehearsal.network import Network, meet, slowest


def rehearse(
    model: Model,
    plan: Plan,
    sequence_length: int,
    global_batch: int,
    *,
    pace: Pace,
    network: Network,
    repeats: int = 2,
) -> float:
    """Run training steps of a plan, without an optimizer, and return the seconds of the fastest.

    A step lasts from when all ranks begin until the last rank has its gradients.

    Args:
        model: Its layers are run, without embedding and output layer.
        plan: The plan, for all ranks of the world.
        sequence_length: Tokens of a sequence.
        global_batch: Sequences of a step.
        pace: The pace of a whole layer.
        network: The links within and between the two halves of the ranks.
        repeats: How many steps are timed.

    Raises:
        PlanError: If the batch, the heads or the sequence do not divide.
        ValueError: If the plan is for another number of ranks, or their number is odd.
    """
    for what, size, name, parts in (
        ("heads", model.heads, "tp", plan.tp),
        ("sequence_length", sequence_length, "cp", plan.cp),
    ):
        if size % parts:
            raise PlanError(f"{what} = {size} is not a multiple of {name} = {parts}")
    count = plan.microbatches(global_batch)
    groups = Groups.of(plan)
    torch.manual_seed(0)
    layers = [
        RehearsalLayer(model.hidden, model.heads, groups, pace=pace, microbatch=plan.microbatch)
        for _ in range(model.layers)
    ]
    chunks = (plan.chunks,) if plan.schedule == "interleaved" else ()
    schedule = schedules.get(plan.schedule)(plan.pp, count, *chunks)
    shape = count * plan.microbatch, sequence_length // plan.cp, model.hidden
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with Pipeline(
        layers, schedule, squares, group=groups.pipeline, replicas=groups.replicas
    ) as pipeline:
        paces = _at_full_speed(layers)
        _step(pipeline, inputs, sequence_length)  # the first one makes connections
        for layer, times in paces.items():
            layer.times = times
        with network.paced():
            seconds = [_step(pipeline, inputs, sequence_length) for _ in range(repeats)]
    groups.close()
    return min(slowest(seconds))


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed squares of what the last layer returns."""
    return (outputs - targets).square().sum()


def _step(pipeline, inputs, sequence_length):
    for parameter in pipeline.parameters():
        parameter.grad = None
    meet()
    start = perf_counter()
    pipeline.step(inputs, torch.zeros_like(inputs), inputs.numel())
    return perf_counter() - start


def _at_full_speed(layers):
    """Set the pace of all layers to 0 s, and return the previous pace by layer."""
    paced = [layer for layer in nn.ModuleList(layers).modules() if isinstance(layer, Paced)]
    paces = {layer: layer.times for layer in paced}
    for layer in paced:
        layer.times = dict.fromkeys(layer.times, 0.0)
    return paces
