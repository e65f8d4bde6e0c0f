"""How long the messages of each parallelism take, on the links that its ranks share.

A group of ranks within a node talks over NVLink. A group that spans nodes is as fast as its way out
of a node: the network ports of its members there together, and at most NVLink. The algorithms are
those of `costs`: rings for all-gather and reduce-scatter; for all-reduce between nodes, halving and
doubling, which costs what NCCL's trees cost. Units: seconds, bytes.
"""

from math import gcd, inf
from typing import NamedTuple

from naranhi.costs import bytes_sent, collective_seconds
from naranhi.planning.cluster import Cluster
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan

# Fractions of the data sheet's bandwidth in large collectives: nccl-tests print 230 of 300 GB/s
# on a DGX A100 and 360 of 450 GB/s on a DGX H100, and 85 to 95% of the network between them.
NVLINK = 0.78
NETWORK = 0.85
# Seconds of a collective's message besides its bytes, within a node and between nodes.
NVLINK_LATENCY = 3e-6
NETWORK_LATENCY = 10e-6
# Seconds to start a collective: its kernel within a node; between nodes, until the last rank has
# entered it as well, because hosts launch their kernels at their own pace.
NVLINK_START = 10e-6
NETWORK_START = 250e-6
# A collective that runs behind arithmetic takes multiprocessors and memory bandwidth from it: both
# together take longer by this fraction of the hidden time.
INTERFERENCE = 0.35


class Link(NamedTuple):
    """The link over which a rank of a group sends and receives.

    Attributes:
        latency: Seconds of a message besides its bytes.
        bandwidth: Bytes per second.
        nodes: The nodes that the group spans.
    """

    latency: float
    bandwidth: float
    nodes: int


def group_link(cluster: Cluster, ranks: int, stride: int) -> Link:
    """Return the slowest link of all groups of ranks whose members are `stride` apart.

    If only some groups span two nodes, the other groups wait for them.
    """
    node = cluster.gpus_per_node
    nvlink = cluster.sheet.nvlink * NVLINK
    if not cluster.spans_nodes(ranks, stride):
        return Link(NVLINK_LATENCY, nvlink, 1)
    most = max(1, node // stride)  # members in a node at most; below, at least
    members = max(1, gcd(node, ranks * stride) // stride)
    used = min(members, cluster.runs.ports or members)
    ports = used * cluster.network_bandwidth * NETWORK
    nodes = max(2, -(-ranks // most))
    return Link(NETWORK_LATENCY, min(nvlink, ports) if members > 1 else ports, nodes)


def seconds(collective: str, whole: float, ranks: int, link: Link, bucket: float = inf) -> float:
    """Return the seconds of a collective over `whole` bytes, in buckets of `bucket` bytes.

    The bytes are those of a ring. The latency of an all-gather or a reduce-scatter is a ring's,
    which enters each node once; that of an all-reduce between nodes is that of NCCL's trees. An
    all-reduce within a node has the latency of one of its two rings; the efficiencies in
    `calibrations.csv` are fitted with it.
    """
    if ranks == 1:
        return 0.0
    messages = max(1.0, whole / bucket)
    start = NVLINK_START if link.nodes == 1 else NETWORK_START
    if collective == "all_reduce" and link.nodes > 1:
        # Up and down a tree of nodes.
        start += collective_seconds(collective, 0, link.nodes, link.latency, 0, "halving_doubling")
    else:
        start += (link.nodes - 1) * link.latency + (ranks - link.nodes) * NVLINK_LATENCY
    return messages * start + bytes_sent(collective, whole, ranks) / link.bandwidth


class Exposed(NamedTuple):
    """Seconds for which a rank waits for messages in one layer and one micro-batch.

    Attributes:
        forward: In the forward.
        backward: In the backward.
        recompute: In what the backward computes again.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0


def tensor_layer(
    model: Model, cluster: Cluster, plan: Plan, sequence_length: int, sparse: bool = False
) -> Exposed:
    """Return what tensor parallelism costs a layer: two all-reduces forward and two backward.

    With sequence parallelism, each all-reduce becomes an all-gather and a reduce-scatter; the
    all-gathers repeated for the weights' gradients run behind matmuls, and so does the fraction of
    the rest that the engine overlaps. Full recomputation repeats the messages of the forward.

    A sparse layer whose experts are on several ranks gathers not its tokens but the copies that
    have arrived for its experts, `top_k` for each, and reduces as many (Megatron-Core,
    `transformer/moe/token_dispatcher.py`). These messages wait for the all-to-all, not for a matmul
    behind which they could run. Only ranks that cut the same experts exchange them.
    """
    if plan.tp == 1:
        return Exposed()
    tokens = plan.microbatch * sequence_length / plan.cp
    value = 4 if plan.precision == "fp32" else 2
    link = group_link(cluster, plan.tp, 1)
    whole = value * tokens * model.hidden
    if plan.sequence_parallel:
        once = 2 * seconds("all_gather", whole, plan.tp, link)
        once += 2 * seconds("reduce_scatter", whole, plan.tp, link)
    else:
        once = 2 * seconds("all_reduce", whole, plan.tp, link)
    if link.nodes > 1:  # four collectives, or the two rings of each all-reduce
        once += 4 * (plan.tp - 1) * cluster.runs.ring_step_seconds
    exposed = once * (1 - cluster.runs.tensor_overlap)
    if sparse and plan.etp is not None:  # half of them are the attention's
        shared = 1 if model.shared_experts else 0  # which all ranks cut, like other layers
        exposed = exposed / 2 * (1 + shared) + _copies(model, cluster, plan, whole)
    elif sparse and plan.ep > 1:
        exposed = exposed / 2 + model.top_k * once / 2
    return Exposed(exposed, exposed, exposed if plan.recompute == "full" else 0.0)


def _copies(model, cluster, plan, whole):
    """Return the seconds of gathering and reducing the copies of tokens, where `etp` is not `tp`.

    A rank has 1/tp of the tokens, and receives as many copies as it sends.
    """
    gathered = whole * model.top_k * plan.expert_tp / plan.tp
    link = group_link(cluster, plan.expert_tp, 1)
    return sum(
        seconds(collective, gathered, plan.expert_tp, link)
        for collective in ("all_gather", "reduce_scatter")
    )


def context_layer(
    model: Model, cluster: Cluster, plan: Plan, sequence_length: int, attention: float
) -> Exposed:
    """Return the seconds that ring attention exposes: its messages run behind `attention` seconds.

    The forward sends keys and values, the backward also their gradients, behind 2.5 `attention`.
    """
    if plan.cp == 1:
        return Exposed()
    link = group_link(cluster, plan.cp, plan.tp)
    value = 4 if plan.precision == "fp32" else 2
    tokens = plan.microbatch * sequence_length / plan.cp
    block = value * tokens * 2 * model.kv_heads * model.head_dim / plan.tp
    if model.latent:
        block = value * tokens * (model.latent.key_rank + model.latent.rotary_dim)
    start = NVLINK_START if link.nodes == 1 else NETWORK_START
    ring = start + (plan.cp - 1) * (link.latency + block / link.bandwidth)
    forward = max(0.0, ring - attention)
    return Exposed(
        forward,
        max(0.0, 2 * ring - 2.5 * attention),
        forward if plan.recompute == "full" else 0.0,
    )


def expert_layer(model: Model, cluster: Cluster, plan: Plan, sequence_length: int) -> Exposed:
    """Return the seconds of expert parallelism in a sparse layer: two all-to-alls in each pass.

    Each token is sent to its `top_k` experts and comes back. All copies leave the rank except
    those for its own experts.
    """
    if plan.ep == 1:
        return Exposed()
    tokens = plan.microbatch * sequence_length / plan.cp
    if plan.sequence_parallel:
        tokens /= plan.tp
    value = 4 if plan.precision == "fp32" else 2
    # Unlike a ring, an all-to-all sends most of its bytes out of the node, each over one port.
    link = group_link(cluster, plan.ep, plan.expert_tp)
    engine, near = cluster.runs, 1 / link.nodes
    whole = value * tokens * model.hidden
    # Of a token's experts, the fraction `near` is in this node, and 1/ep on this rank.
    inside = whole * model.top_k * (near - 1 / plan.ep)
    outside = whole * model.top_k * (1 - near)
    if engine.expert_nodes:  # once to each node with one of its experts, from there over NVLink
        visited = link.nodes * (1 - (1 - near) ** model.top_k)
        inside = whole * model.top_k * (plan.ep - 1) / plan.ep
        outside = whole * min(visited, engine.expert_nodes) * (1 - near)
    sent = outside / (cluster.network_bandwidth * NETWORK)
    sent += inside / (cluster.sheet.nvlink * NVLINK)
    start = NVLINK_START if link.nodes == 1 else NETWORK_START
    once = 2 * (start + link.latency * (plan.ep - 1).bit_length() + sent)
    once *= 1 - engine.expert_overlap
    return Exposed(once, once, once if plan.recompute == "full" else 0.0)


def behind(messages: float, arithmetic: float) -> float:
    """Return the seconds that messages add to the arithmetic that they run behind."""
    return max(0.0, messages - arithmetic) + INTERFERENCE * min(messages, arithmetic)


def between_nodes(cluster: Cluster, plan: Plan) -> bool:
    """Return whether some neighbouring stages of a pipeline are on different nodes.

    A pipeline over several nodes has to leave one of them somewhere, even if several stages fit
    into each. The slowest of its messages sets the pace of all stages.
    """
    return plan.pp > 1 and plan.ranks > cluster.gpus_per_node


def hop_seconds(model: Model, cluster: Cluster, plan: Plan, sequence_length: int) -> float:
    """Return the seconds of a message between two stages.

    With sequence parallelism, each tensor parallel rank holds 1/tp of the message. Without it, each
    also sends only 1/tp (Narayanan et al. 2021, section 4.1: scatter and gather over NVLink),
    unless the engine sends whole messages.
    """
    if plan.pp == 1:
        return 0.0
    tokens = plan.microbatch * sequence_length / plan.cp
    value = 4 if plan.precision == "fp32" else 2
    message = value * tokens * model.hidden / (1 if cluster.runs.blocking_messages else plan.tp)
    if not between_nodes(cluster, plan):
        return NVLINK_START + NVLINK_LATENCY + message / (cluster.sheet.nvlink * NVLINK)
    return NVLINK_START + NETWORK_LATENCY + message / (cluster.network_bandwidth * NETWORK)
