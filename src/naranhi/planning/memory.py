"""What a rank holds: model state, activations, what the loss and the gathers need on top.

Units: bytes.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from naranhi.costs import zero_bytes
from naranhi.planning.activations import layer_activations
from naranhi.planning.cluster import Cluster
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.stages import cut


class Memory(NamedTuple):
    """The bytes that a rank of one stage holds at the fullest moment of a step.

    Attributes:
        parameters: The weights that it computes with.
        gradients: Their accumulated gradients.
        optimizer: The fp32 copy and Adam's two moments.
        activations: Of all micro-batches in flight.
        working: What one layer, or the loss, needs besides for a moment.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def in_flight(schedule: str, stages: int, stage: int, microbatches: int, chunks: int = 1) -> float:
    """Return the micro-batches whose activations a stage holds at once, at most.

    These are the bounds that the schedules' own docstrings state; a chunk of an interleaved rank
    counts 1/chunks.
    """
    if schedule == "gpipe":
        return microbatches
    if schedule == "inter_layer":
        return 1
    if schedule == "one_f_one_b":
        return min(stages - stage, microbatches)
    if schedule == "zero_bubble_h1":
        return min(stages, microbatches)
    if schedule == "zero_bubble_h2":
        return min(2 * stages - 1, microbatches)
    return min(stages + (stages - 1 - 2 * stage) / chunks, microbatches)


def stage_parameters(model: Model, cluster: Cluster, plan: Plan) -> tuple[tuple[float, float], ...]:
    """Return (dense, expert) parameters of each stage, on one tensor and expert parallel rank.

    A tied embedding is on the first and on the last stage, if these are different.
    """
    return _stage_parameters(model, cluster.runs.cut, plan.tp, plan.pp, plan.ep, plan.chunks)


@lru_cache(maxsize=65536)
def _stage_parameters(model, how, tp, pp, ep, chunks):
    whole_cut = cut(model, pp * chunks, how)
    virtual, head = whole_cut.layers, whole_cut.head % pp
    result = []
    for stage in range(pp):
        layers = [layer for part in virtual[stage::pp] for layer in part]
        dense = experts = 0.0
        for layer in layers:
            whole = model.layer_parameters(layer)
            routed = model.experts * model.expert_parameters if model.sparse(layer) else 0
            dense, experts = dense + (whole - routed) / tp, experts + routed / (tp * ep)
        if stage == 0:
            dense += model.embedding_parameters / tp + model.positions * model.hidden
        if stage == head and not (model.tied and head == 0):
            dense += model.embedding_parameters / tp
        result.append((dense, experts))
    return tuple(result)


def stage_memory(
    model: Model, cluster: Cluster, plan: Plan, sequence_length: int, microbatches: int
) -> tuple[Memory, ...]:
    """Return the Memory of each stage."""
    engine = cluster.runs
    whole_cut = cut(model, plan.pp * plan.chunks, engine.cut)
    virtual, head = whole_cut.layers, whole_cut.head % plan.pp
    kept = [
        layer_activations(model, cluster, plan, sequence_length, sparse)
        for sparse in ((False, True) if model.experts else (False,))
    ]
    tokens = plan.microbatch * sequence_length / plan.cp
    value = 4 if plan.precision == "fp32" else 2
    logits = engine.logit_bytes * tokens * model.vocabulary / plan.tp
    again = 0.0
    if plan.recompute == "full":
        whole = replace(plan, recompute="none")
        again = layer_activations(model, cluster, whole, sequence_length, bool(model.experts))
    result = []
    for stage, (dense, experts) in enumerate(stage_parameters(model, cluster, plan)):
        held = in_flight(plan.schedule, plan.pp, stage, microbatches, plan.chunks)
        layers = [layer for part in virtual[stage :: plan.pp] for layer in part]
        of_layers = sum(kept[model.sparse(layer)] for layer in layers)
        parameters, gradients, optimizer = (
            a + b
            for a, b in zip(
                _state(plan, engine.held_gradient_bytes, dense, plan.zero_group),
                _state(
                    plan, engine.held_gradient_bytes, experts, max(1, plan.zero_group // plan.ep)
                ),
                strict=True,
            )
        )
        # For a moment: what tensor parallel ranks have gathered (the input of a layer, its
        # gradient, an output not yet reduced), and the gradients of the widest activations.
        working = again + value * tokens * (
            (3 * model.hidden if plan.tp > 1 else 0)
            + (3 if model.gated else 2) * model.ffn / plan.tp
        )
        if plan.zero == 3 and not plan.kept_whole and plan.replicas > 1:
            largest = max(
                (model.layer_parameters(layer, plan.ep) / plan.tp for layer in layers), default=0
            )
            working += (2 * value + engine.gradient_bytes) * largest
        entry = value * tokens * model.hidden / (plan.tp if plan.sequence_parallel else 1)
        if stage == head:
            working = max(working, _scored(plan, stage, microbatches) * logits)
            of_layers += entry  # the input of the last norm
        result.append(Memory(parameters, gradients, optimizer, held * of_layers, working))
    return tuple(result)


def _scored(plan, stage, microbatches):
    """Return the micro-batches that have logits but no backward yet, on the head's stage."""
    if plan.schedule == "gpipe":
        return microbatches
    return min(plan.pp - stage, microbatches) if plan.schedule == "one_f_one_b" else 1


def _state(plan, gradient_bytes, parameters, ranks):
    """Return the bytes of parameters, gradients and optimizer state, from `costs.zero_bytes`."""
    precision = "fp32" if plan.precision == "fp32" else "bf16"
    value = 4 if precision == "fp32" else 2
    stage = min(plan.zero, 1) if plan.kept_whole else plan.zero
    whole = zero_bytes(parameters, ranks, stage, precision)
    held = parameters / ranks if stage == 3 else parameters
    summed = parameters / ranks if stage >= 2 else parameters
    return (
        value * held,
        max(gradient_bytes, value) * summed,
        whole - value * held - value * summed,
    )
