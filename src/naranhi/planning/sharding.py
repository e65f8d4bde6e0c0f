"""How long data parallel ranks take to gather parameters and to reduce gradients, sharded or not.

Experts are on fewer ranks than the other parameters: each of `ep` neighbouring ranks has different
experts, so only every `ep`-th rank has the same. Units: seconds, bytes, parameters.
"""

from typing import NamedTuple

from naranhi.planning.cluster import Cluster
from naranhi.planning.communication import Exposed, behind, group_link, seconds
from naranhi.planning.plan import Plan


def sharded_layer(
    cluster: Cluster,
    plan: Plan,
    dense: float,
    forward: float,
    backward: float,
    experts: float = 0.0,
) -> Exposed:
    """Return what ZeRO-3 exposes of a layer: the gathers, and the reduction of its gradients.

    The all-gather of the next layer runs behind this layer's arithmetic, and so does the
    reduce-scatter of the previous layer's gradients; what exceeds the arithmetic is exposed.

    Args:
        cluster: The cluster.
        plan: The plan.
        dense: Parameters outside of experts that a tensor parallel rank gathers.
        forward: Seconds of the layer's forward for one micro-batch.
        backward: Seconds of its backward, with what it computes again.
        experts: Parameters of experts, on an expert and tensor parallel rank.
    """
    gather, reduce = _sharded(cluster, plan, dense, experts)
    return Exposed(behind(gather, forward), behind(gather + reduce, backward))


def sharded_ends(cluster: Cluster, plan: Plan, parameters: float) -> Exposed:
    """Return what ZeRO-3 exposes of embeddings and output layer, for one micro-batch.

    They are gathered before the first layer, kept, and reduced after the last backward, as FSDP
    does with what its root module has (`torch.distributed.fsdp`): no arithmetic hides
    either.
    """
    return Exposed(*_sharded(cluster, plan, parameters, 0.0))


def _sharded(cluster, plan, dense, experts):
    """Return the seconds of gathering the parameters, and of reducing their gradients, once."""
    if plan.zero < 3 or plan.kept_whole or _alone(plan, experts):
        return 0.0, 0.0
    value = 4 if plan.precision == "fp32" else 2
    gather = reduce = 0.0
    for group, parameters in _groups(plan, dense, experts):
        link = group_link(cluster, group.ranks, group.stride)
        gradients = cluster.runs.reduced_bytes(plan.precision) * parameters
        gather += seconds("all_gather", value * parameters, group.ranks, link)
        reduce += seconds("reduce_scatter", gradients, group.ranks, link)
        reduce += _between_groups(cluster, plan, group, gradients)
    return gather, reduce


def gradient_seconds(
    cluster: Cluster, plan: Plan, dense: float, experts: float = 0.0
) -> tuple[float, float]:
    """Return the seconds of reducing the gradients, and of gathering the parameters, once.

    Stage 0 all-reduces the gradients. Stages 1 and 2 reduce-scatter them (stage 2 those of each
    micro-batch, unless the plan has a pipeline) and all-gather what the optimizer has updated.
    Stage 3 does both layer by layer, unless the plan has a pipeline.

    Args:
        cluster: The cluster.
        plan: The plan.
        dense: Parameters of a rank outside of experts.
        experts: Parameters of its experts.
    """
    if _alone(plan, experts) or (plan.zero == 3 and not plan.kept_whole):
        return 0.0, 0.0
    bucket = _bucket(cluster, plan)
    value = 4 if plan.precision == "fp32" else 2
    reduce = gather = 0.0
    for group, parameters in _groups(plan, dense, experts):
        gradients = cluster.runs.reduced_bytes(plan.precision) * parameters
        if plan.zero == 0:
            link = group_link(cluster, group.replicas, group.stride)
            reduce += seconds("all_reduce", gradients, group.replicas, link, bucket)
            continue
        link = group_link(cluster, group.ranks, group.stride)
        reduce += seconds("reduce_scatter", gradients, group.ranks, link, bucket)
        reduce += _between_groups(cluster, plan, group, gradients)
        gather += seconds("all_gather", value * parameters, group.ranks, link, bucket)
    return reduce, gather


class _Group(NamedTuple):
    """Ranks that shard the same parameters, `stride` apart, among `replicas` that have them."""

    ranks: int
    stride: int
    replicas: int


def _groups(plan, dense, experts):
    """Yield who shards a rank's parameters, and those of its experts."""
    if dense:
        yield _Group(plan.zero_group, plan.tp, plan.replicas), dense
    if experts:
        stride = plan.expert_tp * plan.ep
        yield _Group(plan.expert_zero_group, stride, plan.expert_replicas), experts


def _alone(plan, experts):
    """Return whether no other rank has the same parameters, nor the same experts."""
    return plan.replicas == 1 and (not experts or plan.expert_replicas == 1)


def _between_groups(cluster, plan, group, gradients):
    """Return the seconds of summing a shard's gradients over the groups that each have it whole."""
    groups = group.replicas // group.ranks
    link = group_link(cluster, groups, group.stride * group.ranks)
    return seconds("all_reduce", gradients / group.ranks, groups, link, _bucket(cluster, plan))


def _bucket(cluster, plan):
    """Return the bytes of gradients, or of parameters, that are sent in one message.

    Megatron-Core (`core/distributed/distributed_data_parallel.py`) puts 40 million parameters in a
    bucket, or a million for each data parallel rank: a ring starts once for each rank.
    """
    engine = cluster.runs
    return max(engine.bucket_bytes, engine.bucket_rank_bytes * plan.replicas)
