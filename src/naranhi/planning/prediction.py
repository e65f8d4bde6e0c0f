"""Forecast a step from a model, a cluster and a plan."""

from math import log2, sqrt
from operator import index

from naranhi.planning import communication as comm
from naranhi.planning import sharding
from naranhi.planning.cluster import Cluster
from naranhi.planning.compute import (
    attention_work,
    embedding_work,
    head_work,
    layer_work,
    optimizer_seconds,
)
from naranhi.planning.forecast import PARTS, Forecast
from naranhi.planning.machine import Machine
from naranhi.planning.memory import stage_memory, stage_parameters, updated_parameters
from naranhi.planning.model import Model
from naranhi.planning.pipeline import pipeline_seconds
from naranhi.planning.plan import Plan
from naranhi.planning.stages import StageTimes, cut

# A step waits for its slowest rank: it is longer by this fraction for each doubling of the nodes.
STRAGGLERS = 0.003
# Relative uncertainty of a forecast, as a standard deviation: of the whole, with and without a run
# of this GPU and engine that calibrates it, and in addition of each part. All runs that calibrate
# are in bf16: of the fp8 peak, twice as high, matmuls may reach a different fraction.
CALIBRATED, UNCALIBRATED = 0.07, 0.18
FP8_COMPUTING = 0.1
# Experts no wider than the hidden state are many small matmuls, whose launches, imbalance and
# sorting no published run calibrates. Of 15 runs of Qwen3, GPT-OSS and DeepSeek-V3 in NVIDIA's
# tables (Megatron Bridge, performance summary, commit 00b7660) most took longer than forecast. With
# this value 12 are inside their interval; the three of Qwen3-30B on H100 and 8 B200, 2.6 to 3.2
# times as long as forecast, are not. (Grok-1's experts, wider than that, are within 15%.)
SMALL_EXPERTS = 0.9
UNCERTAIN = {
    "attention": 0.3,
    "recomputing": 0.1,
    "host": 0.3,
    "tensor": 0.3,
    "context": 0.5,
    "expert": 0.5,
    "sharding": 0.4,
    "bubble": 0.2,
    "pipeline": 0.5,
    "data": 0.4,
    "optimizer": 0.3,
    "stragglers": 1.0,
}
NINE_IN_TEN = 1.645  # standard deviations of a normal distribution


def predict(
    model: Model, cluster: Cluster, plan: Plan, sequence_length: int, global_batch: int
) -> Forecast:
    """Return the forecast of a training step.

    Args:
        model: The model.
        cluster: The cluster.
        plan: How the model is cut over it.
        sequence_length: Tokens of a sequence.
        global_batch: Sequences of a step, over all ranks.

    Raises:
        TypeError: If a number is not a whole number, or an argument is of another class.
        PlanError: If the plan cannot cut this model, cluster or batch. A plan that does not
            fit in memory is not an error: see `Forecast.verdict`.
    """
    check_classes(model=model, cluster=cluster, plan=plan)
    plan.check(model, cluster, sequence_length, global_batch)
    return forecast(model, cluster, plan, index(sequence_length), index(global_batch))


def check_classes(**arguments: object) -> None:
    """Raise TypeError if a model, cluster or plan is of another class.

    Raises:
        TypeError: If an argument is of another class than its name says.
    """
    for name, value in arguments.items():
        kind, example = _CLASSES[name]
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {kind.__name__}, such as {example}, not {value!r}")


def forecast(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    sequence_length: int,
    global_batch: int,
    *,
    exact: bool = True,
) -> Forecast:
    """Return what `predict` returns, for a plan that the caller has checked.

    With `exact=False`, schedules that would have to be simulated get the bubble of stages that are
    all as slow as the slowest: good enough to sort plans.
    """
    count = plan.microbatches(global_batch)
    stages = stage_times(model, cluster, plan, sequence_length)
    ranks = [[stages[n] for n in plan.virtual_stages(rank)] for rank in range(plan.pp)]
    busiest = max(ranks, key=lambda own: sum(v.forward + v.backward for v in own))
    parts = {
        name: count * sum(stage.parts.get(name, 0.0) for stage in busiest) for name in _ON_STAGES
    }
    if plan.pp > 1:
        forward = tuple(stage.forward for stage in stages)
        backward = tuple(stage.backward for stage in stages)
        hop = _hop_seconds(model, cluster, plan, sequence_length)
        flowing = pipeline_seconds(
            plan.schedule, count, forward, backward, 0.0, plan.chunks, exact=exact
        )
        if cluster.runs.blocking_messages:  # one with each neighbour, in each direction
            last = len(stages) - 1
            waits = [hop * ((stage > 0) + (stage < last)) for stage in range(last + 1)]
            forward, backward, hop = _longer(forward, waits), _longer(backward, waits), 0.0
        through = pipeline_seconds(
            plan.schedule, count, forward, backward, hop, plan.chunks, exact=exact
        )
        parts["bubble"] = flowing - sum(parts.values())
        parts["pipeline"] = through - flowing
    held = max(stage_parameters(model, cluster, plan), key=sum)
    reduce, gather = _gradient_seconds(cluster, plan, *held)
    # A chunk's gradients are complete, and its parameters needed, while other chunks compute.
    rounds = min(plan.pp, count) if plan.chunks > 1 else 1
    behind = rounds * cluster.runs.overlap * sum(stage.backward for stage in busiest)
    before = rounds * cluster.runs.gather_overlap * sum(stage.forward for stage in busiest)
    # ZeRO-2 keeps no whole gradients to accumulate, so it reduces those of each micro-batch.
    times = count if plan.zero == 2 and not plan.kept_whole else 1
    parts["data"] = times * comm.behind(reduce, behind) + comm.behind(gather, before)
    if not isinstance(cluster, Machine):  # measured without an optimizer
        updated = updated_parameters(plan, *held)
        parts["optimizer"] = optimizer_seconds(cluster, updated, plan.precision)
    nodes = max(1, cluster.gpus / cluster.gpus_per_node)
    parts["stragglers"] = STRAGGLERS * log2(nodes) * sum(parts.values())
    step = sum(parts.values())
    spread = _spread(parts, step, cluster.calibrated, _computing(model, plan))
    tokens = global_batch * sequence_length / cluster.gpus
    flops = model.flops_per_token(sequence_length) * tokens / step
    return Forecast(
        step_seconds=step,
        low=step / (1 + spread),
        high=step * (1 + spread) + (count * cluster.runs.stall_seconds if nodes > 1 else 0.0),
        parts={name: parts[name] for name in PARTS if parts.get(name, 0.0) > 1e-9 * step},
        memory=stage_memory(model, cluster, plan, sequence_length, count),
        capacity=cluster.capacity,
        tokens_per_second_per_gpu=tokens / step,
        tflops_per_gpu=flops / 1e12,
        mfu=flops / cluster.sheet.flops[plan.precision],
    )


def stage_times(
    model: Model, cluster: Cluster, plan: Plan, sequence_length: int
) -> list[StageTimes]:
    """Return the seconds of each virtual stage for one micro-batch."""
    if isinstance(cluster, Machine):
        return cluster.stage_times(model, plan, sequence_length)
    where = cut(model, plan.pp * plan.chunks, cluster.runs.cut)
    dense = layer_times(model, cluster, plan, sequence_length, sparse=False)
    sparse = dense
    if model.experts:
        sparse = layer_times(model, cluster, plan, sequence_length, sparse=True)
    ends = {
        0: [embedding_work(model, cluster, plan, sequence_length)],
        where.head: [head_work(model, cluster, plan, sequence_length)],
    }
    if where.head == 0:
        ends[0].append(embedding_work(model, cluster, plan, sequence_length))
    result = []
    for stage, layers in enumerate(where.layers):
        with_experts = sum(model.sparse(layer) for layer in layers)
        forward = backward = computing = 0.0
        for work in ends.get(stage, ()):
            forward, backward = forward + work.forward, backward + work.backward
            computing += work.forward + work.backward
        # 0 in a pipeline, which keeps its parameters; else there is only one stage.
        sharded = sharding.sharded_ends(cluster, plan, model.end_parameters / plan.tp)
        forward, backward = forward + sharded.forward, backward + sharded.backward
        parts = {"computing": computing, "sharding": sum(sharded)}
        for number, layer in ((len(layers) - with_experts, dense), (with_experts, sparse)):
            if number:
                forward += number * layer.forward
                backward += number * layer.backward
                for name, time in layer.parts.items():
                    parts[name] = parts.get(name, 0.0) + number * time
        result.append(StageTimes(forward, backward, parts))
    return result


def layer_times(
    model: Model, cluster: Cluster, plan: Plan, sequence_length: int, *, sparse: bool
) -> StageTimes:
    """Return the seconds of one layer for one micro-batch, on a rank, with its messages."""
    work = layer_work(model, cluster, plan, sequence_length, sparse)
    tensor = comm.tensor_layer(model, cluster, plan, sequence_length, sparse)
    scores = attention_work(model, cluster, plan, sequence_length)
    context = comm.context_layer(model, cluster, plan, sequence_length, scores.forward)
    expert = comm.Exposed()
    if sparse:
        expert = comm.expert_layer(model, cluster, plan, sequence_length)
    messages = (tensor, context, expert)
    forward = work.forward + sum(e.forward for e in messages)
    backward = work.backward + work.recompute + sum(e.backward + e.recompute for e in messages)
    host = cluster.runs.host_seconds
    if comm.between_nodes(cluster, plan):
        host = max(host, plan.tp * cluster.runs.pipeline_rank_seconds)
    # In thirds of a forward and a backward: recomputed kernels are launched again.
    thirds = 3 + work.recompute / work.forward
    idle = max(0.0, host * thirds / 3 - forward - backward)
    forward, backward = forward + idle / thirds, backward + idle * (1 - 1 / thirds)
    place = model.layers - 1 if sparse else 0
    dense, experts = model.rank_parameters(place, plan.tp, plan.ep, plan.etp)
    sharded = sharding.sharded_layer(cluster, plan, dense, forward, backward, experts)
    parts = {
        "computing": work.forward + work.backward - scores.forward - scores.backward,
        "attention": scores.forward + scores.backward,
        "recomputing": work.recompute,
        "host": idle,
        "tensor": sum(tensor),
        "context": sum(context),
        "expert": sum(expert),
        "sharding": sum(sharded),
    }
    return StageTimes(forward + sharded.forward, backward + sharded.backward, parts)


def _hop_seconds(model, cluster, plan, sequence_length):
    if isinstance(cluster, Machine):
        return cluster.hop_seconds(model, plan, sequence_length)
    return comm.hop_seconds(model, cluster, plan, sequence_length)


def _gradient_seconds(cluster, plan, dense, experts):
    if isinstance(cluster, Machine):  # whose ranks keep their parameters
        return cluster.gradient_seconds(plan, dense + experts), 0.0
    return sharding.gradient_seconds(cluster, plan, dense, experts)


_CLASSES = {
    "model": (Model, "Model(32, 4096, 32) or Model.from_config(path)"),
    "cluster": (Cluster, "Cluster(64, gpu='H100')"),
    "plan": (Plan, "Plan(dp=8, tp=8)"),
}
_ON_STAGES = (
    "computing",
    "attention",
    "recomputing",
    "host",
    "tensor",
    "context",
    "expert",
    "sharding",
)


def _longer(times, waits):
    return tuple(time + wait for time, wait in zip(times, waits, strict=True))


def _computing(model, plan):
    """Return the relative uncertainty of the matmuls, in addition to that of the whole forecast."""
    own = FP8_COMPUTING if plan.precision == "fp8" else 0.0
    return max(own, SMALL_EXPERTS) if model.experts and model.expert_ffn <= model.hidden else own


def _spread(parts, step, calibrated, computing):
    """Return the relative spread within which nine of ten steps are expected."""
    own = CALIBRATED if calibrated else UNCALIBRATED
    uncertain = UNCERTAIN | {"computing": computing}
    shares = (uncertain.get(name, 0.0) * time / step for name, time in parts.items())
    return NINE_IN_TEN * sqrt(own**2 + sum(share**2 for share in shares))
