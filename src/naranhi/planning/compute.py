"""How long a layer's arithmetic takes on one GPU.

A matmul computes, at the fraction of the peak that the cluster states, and moves its three matrices
to or from memory; the two overlap in part. So a matmul with a short side, as tensor parallelism
makes them, takes longer per operation, and no table of measured shapes is needed.
What is not a matmul (norms, activations, residuals, an unfused softmax) only moves bytes.
Units: seconds, bytes, operations.
"""

from typing import NamedTuple

from naranhi.planning.cluster import Cluster
from naranhi.planning.model import Matmul, Model
from naranhi.planning.plan import Plan

# Part of the data sheet's memory bandwidth that a kernel reaches; STREAM-like copies on A100 and
# H100 reach nine tenths.
BANDWIDTH = 0.85
# How a kernel's arithmetic a and traffic m overlap: it takes (a^e + m^e)^(1/e), one after the other
# if e = 1, and the roofline if e is infinite. Tiles load while others multiply, except the first.
OVERLAPPING = 1.3
FLASH_BACKWARD = 2.5  # FlashAttention's backward, in forwards: it computes the scores again


class Work(NamedTuple):
    """Seconds of a part of the model for one micro-batch.

    Attributes:
        forward: Of the forward.
        backward: Of the backward without recomputation.
        recompute: Of what the backward computes again first.
    """

    forward: float
    backward: float
    recompute: float = 0.0


class Arithmetic:
    """The rates of a cluster's GPU at a precision."""

    def __init__(self, cluster: Cluster, precision: str) -> None:
        sheet, engine = cluster.sheet, cluster.runs
        self.rate: float = sheet.flops[precision] * cluster.matmul_efficiency
        self.attention_rate: float = sheet.flash[max(0, engine.flash - 1)]
        if precision == "fp32":
            # FlashAttention has 16 bits only. Other kernels that keep no scores, such as PyTorch's
            # memory-efficient one, are taken to be as fast as its first generation would be.
            self.attention_rate = sheet.flash[0] * sheet.flops["fp32"] / sheet.flops["bf16"]
        self.bandwidth: float = sheet.bandwidth * BANDWIDTH
        self.casts: bool = precision == "fp8"
        self.value: int = 4 if precision == "fp32" else 2
        # Bytes of an element of the summed gradient: with FSDP, it has the weight's own dtype.
        self.gradient: int = self.value if engine.casts_shards else engine.reduced_bytes(precision)

    def matmul(self, tokens: float, rows: float, columns: float, more: float = 0.0) -> float:
        """Return the seconds of (tokens x rows) times (rows x columns); also move `more` bytes."""
        moved = self.value * (tokens * rows + rows * columns + tokens * columns)
        if self.casts:  # the factors have 8 bits
            moved = tokens * rows + rows * columns + self.value * tokens * columns
        arithmetic = 2 * tokens * rows * columns / self.rate
        return _together(arithmetic, (moved + more) / self.bandwidth)

    def move(self, moved: float) -> float:
        """Return the seconds of reading and writing that many bytes in all."""
        return moved / self.bandwidth

    def cast(self, elements: float) -> float:
        """Return the seconds to cast matrices of that many elements to fp8; 0 if not in fp8.

        Separate kernels read 16 bits and write 8 bits twice, because a matrix is multiplied
        along its rows once and along its columns once (Transformer Engine, performance
        considerations: handling transposes). Weights are cast once a step, which is not counted.
        """
        return self.move((2 + 2 * 1) * elements) if self.casts else 0.0


def layer_work(
    model: Model, cluster: Cluster, plan: Plan, sequence_length: int, sparse: bool
) -> Work:
    """Return the seconds of one Transformer layer for one micro-batch, on one rank."""
    gpu, engine = Arithmetic(cluster, plan.precision), cluster.runs
    tokens = plan.microbatch * sequence_length / plan.cp
    forward = backward = 0.0
    for matmul in model.attention:
        forward, backward = _add(forward, backward, gpu, matmul, tokens, plan.tp)
    scores = attention_work(model, cluster, plan, sequence_length)
    if sparse:
        # Per expert held, on average. Ranks that do not cut the same experts see other tokens.
        visited = tokens * model.top_k * plan.ep / model.experts * plan.expert_tp / plan.tp
        held = model.experts / plan.ep
        for matmul in model.mlp(model.expert_ffn):
            expert = _add(0.0, 0.0, gpu, matmul, visited, plan.expert_tp)
            forward, backward = forward + held * expert[0], backward + held * expert[1]
            for _ in range(model.shared_experts):
                forward, backward = _add(forward, backward, gpu, matmul, tokens, plan.tp)
        widths = (model.top_k + model.shared_experts) * model.expert_ffn
        permuted = _permuting_bytes(model, gpu, plan, tokens, held)
    else:
        for matmul in model.mlp():
            forward, backward = _add(forward, backward, gpu, matmul, tokens, plan.tp)
        widths, permuted = model.ffn, 0.0
    elementwise = _elementwise_bytes(model, gpu, engine, plan, tokens, widths)
    moved = gpu.move(elementwise + engine.elementwise * permuted)
    forward += scores.forward + moved
    backward += scores.backward + 2 * moved
    again = {"none": 0.0, "selective": engine.selective * forward, "full": forward}[plan.recompute]
    if plan.recompute == "selective" and not engine.flash:
        again = scores.forward  # flash computes the scores again in any case
    return Work(forward, backward, again)


def attention_work(model: Model, cluster: Cluster, plan: Plan, sequence_length: int) -> Work:
    """Return the seconds of a layer's attention without its weight matmuls, for one micro-batch."""
    gpu, engine = Arithmetic(cluster, plan.precision), cluster.runs
    local = sequence_length / plan.cp
    operations = plan.microbatch * local * sequence_length * model.score_width / plan.tp
    if not engine.balanced_ring:  # the last rank meets all cp blocks of keys, half of its own
        operations *= 2 - 1 / plan.cp
    if engine.flash:  # two for a multiplication and an addition, and half of them are masked
        forward = operations / gpu.attention_rate
        return Work(forward, FLASH_BACKWARD * forward)
    scores = plan.microbatch * model.heads / plan.tp * local * sequence_length
    # Written, read and written by the softmax, read and written by dropout with a mask, read.
    forward = 2 * operations / gpu.rate + gpu.move(scores * (6 * gpu.value + model.dropout))
    backward = 4 * operations / gpu.rate + gpu.move(scores * (9 * gpu.value + model.dropout))
    return Work(forward, backward)


def head_work(model: Model, cluster: Cluster, plan: Plan, sequence_length: int) -> Work:
    """Return the seconds of the output layer and the loss for one micro-batch, on one rank."""
    gpu = Arithmetic(cluster, "bf16" if plan.precision == "fp8" else plan.precision)
    tokens = plan.microbatch * sequence_length / plan.cp
    head = Matmul(model.hidden, model.vocabulary, "columns")
    forward, backward = _add(0.0, 0.0, gpu, head, tokens, plan.tp)
    # Logits to fp32, their maximum, their exponentials, the sum; and the gradient back.
    moved = gpu.move(tokens * model.vocabulary / plan.tp * 16)
    return Work(forward + moved, backward + moved)


def embedding_work(model: Model, cluster: Cluster, plan: Plan, sequence_length: int) -> Work:
    """Return the seconds of the embedding for one micro-batch, on one rank."""
    gpu = Arithmetic(cluster, plan.precision)
    tokens = plan.microbatch * sequence_length / plan.cp
    moved = gpu.move(2 * gpu.value * tokens * model.hidden)
    return Work(moved, 2 * moved)


def optimizer_seconds(cluster: Cluster, parameters: float, precision: str = "bf16") -> float:
    """Return the seconds of Adam on that many parameters of one rank, with clipping by norm.

    Its traffic: the gradient is read for the norm, read and written to be scaled, and read again;
    the fp32 parameter and both moments are read and written; the bf16 parameter, if there is one,
    is written; the gradient is set to zero.
    """
    gradient, copy = cluster.runs.reduced_bytes(precision), 0 if precision == "fp32" else 2
    return parameters * (5 * gradient + 3 * 8 + copy) / (cluster.sheet.bandwidth * BANDWIDTH)


def _add(forward, backward, gpu, matmul, tokens, tp):
    rows = matmul.rows / (tp if matmul.split == "rows" else 1)
    columns = matmul.columns / (tp if matmul.split == "columns" else 1)
    once = gpu.matmul(tokens, rows, columns)
    # The weight's gradient is added to the sum of the micro-batches before: read and written.
    with_sum = gpu.matmul(tokens, rows, columns, 2 * gpu.gradient * rows * columns)
    # A matmul that is split by columns follows a norm, which writes its output in fp8.
    given = 0.0 if matmul.split == "columns" else gpu.cast(tokens * rows)
    return forward + given + once, backward + gpu.cast(tokens * columns) + once + with_sum


def _together(arithmetic, moving):
    """Return the seconds of a kernel that multiplies and moves, which overlap in part."""
    return (arithmetic**OVERLAPPING + moving**OVERLAPPING) ** (1 / OVERLAPPING)


def _permuting_bytes(model, gpu, plan, tokens, held):
    """Return the bytes that sorting tokens by their experts reads and writes, there and back.

    A token is read once and its copies are written, and the copies are read again for their sum.
    On a rank with several experts, what arrives from other ranks is in the order of these ranks:
    all copies are sorted once more, and back, after tensor parallel ranks have gathered theirs
    (Megatron-Core, `transformer/moe/token_dispatcher.py`: `sort_chunks_by_idxs`).
    """
    shared = plan.tp if plan.sequence_parallel else 1
    passes = 2 * (1 + model.top_k) / shared
    if plan.ep > 1 and held > 1:
        passes += 4 * model.top_k * plan.expert_tp / plan.tp
    return gpu.value * tokens * passes * model.hidden


def _elementwise_bytes(model, gpu, engine, plan, tokens, widths):
    """Return the bytes that norms, residuals and activations of a forward read and write."""
    shared = plan.tp if plan.sequence_parallel else 1
    each = gpu.value * tokens
    hidden = 2 * 2 + 2 * 3 + model.dropout  # two norms, two residuals, masks
    inner = (3 if model.gated else 2) * widths / plan.tp
    rotary = 0 if model.positions else 2 * (model.heads + model.kv_heads) * model.head_dim / plan.tp
    return engine.elementwise * each * (hidden * model.hidden / shared + inner + rotary)
