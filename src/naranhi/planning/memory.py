"""The memory of a rank: model state, activations, and the needs of loss, gathers and update.

Units: bytes.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from naranhi.costs import zero_bytes
from naranhi.planning.activations import inner_width, layer_activations, layer_scores
from naranhi.planning.cluster import Cluster
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.stages import cut

# Kernels that CUDA lets a host launch ahead of the GPU, and those of a sharded layer's forward.
LAUNCHES_AHEAD, LAUNCHES_OF_A_LAYER = 1024, 34


class Memory(NamedTuple):
    """The bytes that a rank of one stage holds at the fullest moment of a step.

    Attributes:
        parameters: The weights that it computes with.
        gradients: Their accumulated gradients.
        optimizer: The fp32 copy and Adam's two moments.
        activations: Of all micro-batches in flight.
        working: Temporary bytes of one layer, the loss, or the optimizer's update.
        cached: Blocks that the allocator keeps although nothing uses them at that moment: it frees
            them before it runs out of memory, so they do not decide what fits.
        fragments: Free pieces of blocks that are partly in use: too small for the next allocation,
            and impossible to free.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    cached: float = 0.0
    fragments: float = 0.0

    @property
    def total(self) -> float:
        """All that is in use, as `torch.cuda.max_memory_allocated` counts it."""
        return sum(self[:5])

    @property
    def needed(self) -> float:
        """The bytes that must fit: all that is in use, and the fragments."""
        return self.total + self.fragments

    @property
    def reserved(self) -> float:
        """The bytes in use, cached, or lost in fragments: runs report them as reserved memory."""
        return self.total + self.cached + self.fragments

    @property
    def wanted(self) -> float:
        """The bytes that must fit if the allocator is never to free a block."""
        return sum(self)


def in_flight(schedule: str, stages: int, stage: int, microbatches: int, chunks: int = 1) -> float:
    """Return the most micro-batches whose activations a stage holds at once.

    These are the bounds that the docstrings of the schedules state; one of a rank's chunks counts
    1/chunks.
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
    if schedule == "zero_bubble_v":  # of two chunks
        return min(stages, (microbatches + stage + 1) / 2, microbatches)
    if schedule == "dualpipe_v":
        return min(stages + 0.5, microbatches)
    return min(stages + (stages - 1 - 2 * stage) / chunks, microbatches)


def stage_parameters(model: Model, cluster: Cluster, plan: Plan) -> tuple[tuple[float, float], ...]:
    """Return (dense, expert) parameters of each stage, on one tensor and expert parallel rank.

    A tied embedding is on the first and on the last stage, if these are different.
    """
    ranks = tuple(map(plan.virtual_stages, range(plan.pp)))
    return _stage_parameters(model, cluster.runs.cut, plan.tp, plan.ep, plan.etp, ranks)


@lru_cache(maxsize=65536)
def _stage_parameters(model, how, tp, ep, etp, ranks):
    whole_cut = cut(model, sum(map(len, ranks)), how)
    head = next(rank for rank, own in enumerate(ranks) if whole_cut.head in own)
    result = []
    for stage, own in enumerate(ranks):
        layers = [layer for part in own for layer in whole_cut.layers[part]]
        dense = experts = 0.0
        for layer in layers:
            own_dense, own_experts = model.rank_parameters(layer, tp, ep, etp)
            dense, experts = dense + own_dense, experts + own_experts
        if stage == 0:
            dense += model.embedding_parameters / tp + model.positions * model.hidden
        if stage == head and not (model.tied and head == 0):
            dense += model.embedding_parameters / tp
        result.append((dense, experts))
    return tuple(result)


def updated_parameters(plan: Plan, dense: float, experts: float) -> float:
    """Return how many of a rank's parameters its optimizer updates.

    Experts are on different ranks from the rest, so they have a different number of shards.
    """
    if not plan.zero:
        return dense + experts
    return dense / plan.zero_group + experts / plan.expert_zero_group


def stage_memory(
    model: Model, cluster: Cluster, plan: Plan, sequence_length: int, microbatches: int
) -> tuple[Memory, ...]:
    """Return the Memory of each stage."""
    engine = cluster.runs
    whole_cut = cut(model, plan.pp * plan.chunks, engine.cut)
    head = plan.rank_of(whole_cut.head)
    kept = [
        layer_activations(model, cluster, plan, sequence_length, sparse)
        for sparse in ((False, True) if model.experts else (False,))
    ]
    tokens = plan.microbatch * sequence_length / plan.cp
    value = 4 if plan.precision == "fp32" else 2
    logits = tokens * model.vocabulary / plan.tp
    layer_forward, layer_backward = _one_layer(model, cluster, plan, sequence_length)
    logit_bytes = engine.logit_bytes if plan.tp == 1 else engine.split_logit_bytes
    entry = value * tokens * model.hidden / (plan.tp if plan.sequence_parallel else 1)
    messages = _messages(engine, plan, microbatches) * entry
    # In a pipeline only FSDP has buffers for what it gathers and reduces: others do as stage 1.
    sharded = plan.zero == 3 and plan.replicas > 1 and (engine.casts_shards or not plan.kept_whole)
    result = []
    for stage, (dense, experts) in enumerate(stage_parameters(model, cluster, plan)):
        held = in_flight(plan.schedule, plan.pp, stage, microbatches, plan.chunks)
        own = plan.virtual_stages(stage)
        layers = [layer for part in own for layer in whole_cut.layers[part]]
        of_layers = sum(kept[model.sparse(layer)] for layer in layers)
        parameters, gradients, optimizer = (
            a + b
            for a, b in zip(
                _state(plan, engine, dense, plan.zero_group),
                _state(plan, engine, experts, plan.expert_zero_group),
                strict=True,
            )
        )
        forward, layer = layer_forward + messages, layer_backward + messages
        if sharded:
            each = [sum(model.rank_parameters(n, plan.tp, plan.ep, plan.etp)) for n in layers]
            largest = max(each, default=0.0)
            # A layer's parameters, those of the next one, and the gradients that are reduced.
            forward += 2 * value * largest
            layer += (2 * value + engine.reduced_bytes(plan.precision)) * largest
        ends = gathers = 0.0
        if sharded:
            # What is in no layer is gathered before the first layer and freed after the last.
            ends = value * (dense + experts - sum(each))
            gathers = max(ends, value * largest) + value * largest
        loss = 0.0
        if stage == head:
            loss = _scored(plan, stage, microbatches) * logit_bytes * logits
            of_layers += entry  # the input of the last norm
        # What is kept whole is counted with the parameters.
        working = max(layer, loss) + (0.0 if plan.kept_whole else ends)
        cached = 0.0
        if engine.cached == "fsdp":
            # Gathers arrive in the blocks of a separate stream, two modules at a time.
            cached = gathers
            if loss:
                # Blocks of a layer's forward, and of the 16-bit logits, are too small for the fp32
                # logits. A layer's backward comes later, and reuses the blocks of the loss.
                cached += min(forward, loss) + value * logits
        elif engine.cached == "gathers":
            cached = _launched_ahead(model, plan, tokens, microbatches)
        activations = held * of_layers
        lost = engine.fragments * (activations + working)
        backward = Memory(parameters, gradients, optimizer, activations, working, cached, lost)
        update = _at_update(backward, plan, engine, updated_parameters(plan, dense, experts))
        fullest = max(backward, update, key=lambda memory: memory.needed)
        free = max(0.0, cluster.capacity - fullest.total)
        result.append(fullest._replace(cached=min(fullest.cached, free)))
    return tuple(result)


def _at_update(backward, plan, engine, updated):
    """Return what a rank holds while its optimizer updates that many parameters.

    The activations are gone by then, but the allocator keeps their blocks: free, and in general too
    small for the update. Copies of gradients that are made and freed before the update, to compute
    their norm and to flatten them, reuse these blocks or leave further free blocks.
    """
    freed = backward.activations + backward.working + backward.cached
    copies = 0.0 if plan.zero == 3 else engine.update_cached_bytes * updated
    working = engine.update_bytes * updated
    return backward._replace(
        activations=0.0,
        working=working,
        cached=max(freed, copies),
        fragments=engine.fragments * working,
    )


def _one_layer(model, cluster, plan, sequence_length):
    """Return the temporary bytes of a layer: (in its forward, in its backward).

    Both need what tensor parallel ranks have gathered (the input of a layer, an output not yet
    reduced; in the backward, a gradient) and the widest activations, or their gradients. The
    backward also needs the activations that it computes again, and without a fused attention the
    gradients of its scores, before and after dropout.
    """
    sparse = bool(model.experts)
    tokens = plan.microbatch * sequence_length / plan.cp
    value = 4 if plan.precision == "fp32" else 2
    again = 0.0
    if plan.recompute != "none":
        whole = replace(plan, recompute="none")
        again = layer_activations(model, cluster, whole, sequence_length, sparse)
        if plan.recompute == "selective":  # what is kept is there already
            again -= layer_activations(model, cluster, plan, sequence_length, sparse)
    copies = max(1, model.top_k * plan.expert_tp / plan.tp) if sparse else 1
    gathered = 3 * model.hidden * copies if plan.tp > 1 else 0
    widest = (3 if model.gated else 2) * inner_width(model, sparse) / plan.tp
    scores = 0.0
    if not cluster.runs.flash:
        scores = 2 * layer_scores(model, plan, sequence_length)
    forward = value * tokens * (gathered + widest)
    return forward, forward + again + value * scores


def _messages(engine, plan, microbatches):
    """Return how many messages between stages a rank has in memory besides what layers keep.

    One that it has received early, one that it sends, and a gradient that it has received. torch's
    runtime (`torch.distributed.pipelining.stage`) keeps the buffers of all micro-batches from the
    first step on: of each chunk's inputs and gradients, and of its outputs.
    """
    if plan.pp == 1:
        return 0
    return 3 * (plan.chunks * microbatches if engine.casts_shards else 1)


def _launched_ahead(model, plan, tokens, microbatches):
    """Return the bytes of gathered inputs that wait for the GPU while the host runs ahead.

    An input that is gathered on another stream is free for the host only when the GPU is past its
    last use. A host that waits for nothing is `LAUNCHES_AHEAD` kernels ahead, so it has allocated
    the two gathered inputs of as many layers as these kernels make, but at most those of a step. A
    pipeline's host waits for each message.
    """
    if plan.tp == 1 or plan.pp > 1:
        return 0.0
    value = 4 if plan.precision == "fp32" else 2
    layers = min(LAUNCHES_AHEAD / LAUNCHES_OF_A_LAYER, microbatches * model.layers)
    return 2 * layers * value * tokens * model.hidden


def _scored(plan, stage, microbatches):
    """Return the micro-batches that have logits but no backward yet, on the head's stage."""
    if plan.schedule == "gpipe":
        return microbatches
    return min(plan.pp - stage, microbatches) if plan.schedule == "one_f_one_b" else 1


def _state(plan, engine, parameters, ranks):
    """Return the bytes of parameters, gradients and optimizer state, from `costs.zero_bytes`.

    FSDP keeps parameters in fp32, and casts what it gathers. With ZeRO-3 in a pipeline it keeps
    what it has gathered, and accumulates whole gradients over all micro-batches.
    """
    value = 4 if plan.precision == "fp32" else 2
    precision = "fp32" if engine.casts_shards or value == 4 else "bf16"
    kept = 4 if precision == "fp32" else 2
    gathers = plan.zero == 3 and plan.kept_whole
    stage = plan.zero
    if plan.kept_whole and not (engine.casts_shards and plan.zero == 3):
        stage = min(plan.zero, 1)
    gradient = max(engine.held_gradient_bytes, kept)
    gradient += engine.reducer_bytes if plan.replicas > 1 else 0
    whole = zero_bytes(parameters, ranks, stage, precision)
    held = parameters / ranks if stage == 3 else parameters
    summed = parameters / ranks if stage >= 2 else parameters
    besides = parameters if gathers and engine.casts_shards else 0.0
    return (
        kept * held + value * besides,
        gradient * (summed + besides),
        whole - kept * (held + summed),
    )
