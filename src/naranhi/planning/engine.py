"""The properties of a training engine on which seconds and bytes depend.

`engines.csv` has what an engine's authors say or its code does; the note names the engine and its
version. What no source says (the fractions that overlap, the host's time, and for nanotron the late
micro-batches and the free pieces of memory) was inferred from one or a few published runs each, or
from what fits and fails among many, and is only as good as these runs. Units: bytes, seconds.
"""

from functools import lru_cache
from typing import NamedTuple

from naranhi.planning.tables import rows


class Engine(NamedTuple):
    """A training engine: its kernels, its memory, its overlap, its host.

    Attributes:
        name: Its name in `engines.csv`.
        flash: The generation of FlashAttention, 1 to 3; 0 for an attention that writes its scores
            to memory.
        elementwise: Traffic of norms, activations and residuals, in multiples of fused kernels'.
        eager: Whether the outputs of unfused operations are kept for the backward as well.
        logit_bytes: Bytes for each logit while the loss is computed.
        split_logit_bytes: The same where tensor parallel ranks share the vocabulary.
        gradient_bytes: Bytes of the gradient that is accumulated and reduced, for a parameter of
            16 bits.
        held_gradient_bytes: Bytes of gradients that a parameter holds in memory.
        reducer_bytes: Bytes for each parameter in the buckets of a reducer that copies gradients
            in order to send them, as torch's DDP does, where there are ranks to send them to.
        casts_shards: Whether parameters are kept in fp32 and cast as they are gathered, as FSDP
            does, without an additional 16-bit copy.
        headroom: The fraction of a GPU's memory that tensors cannot fill: the CUDA context and the
            communicators' buffers.
        fragments: What is lost in free pieces too small for the next allocation, as a fraction of
            what each micro-batch allocates and frees. (What is allocated once, the model state,
            leaves no such pieces.) 0 if they are counted in `headroom`.
        cached: What its allocator keeps in blocks that are free at the fullest moment: "fsdp" for
            parameters, which FSDP2 gathers on a separate stream, and for an unfused loss, whose
            large blocks cannot reuse those of a layer; "gathers" for inputs gathered while the
            host runs ahead of the GPU; "none" if not known.
        update_bytes: Temporary bytes of the optimizer for each parameter that a rank updates:
            gradients cast to fp32, and the temporary results of an unfused Adam.
        update_cached_bytes: Bytes for each such parameter in blocks freed just before, too small to
            be reused, where the optimizer's tensors are flat: copies of the gradients.
        bucket_bytes: Bytes of gradients, or of parameters, that are sent in one message.
        bucket_rank_bytes: The same for each rank of the group, where that is more: a ring's message
            is cut into as many pieces, which have to stay large.
        overlap: The fraction of the last backward behind which gradients can be reduced.
        gather_overlap: The fraction of the first forward behind which parameters can be gathered.
        tensor_overlap: The fraction of tensor parallel messages that runs behind matmuls.
        balanced_ring: Whether context parallel ranks share a causal attention equally; otherwise
            the last rank, whose tokens attend to all others, keeps the other ranks waiting.
        ports: The network ports of a node that one collective uses; 0 for all.
        expert_overlap: The fraction of the experts' all-to-alls that runs behind arithmetic.
        expert_nodes: The most nodes to which a token is sent, once to each; 0 if it is sent once
            for each expert.
        blocking_messages: Whether a stage waits for each message to a neighbour, and each of its
            tensor parallel ranks sends it whole.
        host_seconds: The least time of a layer's forward and backward: what the host takes to
            launch its kernels.
        pipeline_rank_seconds: The same in a pipeline between nodes for each tensor parallel rank of
            a stage, where that is more. No source says why: on 16 to 256 GPUs, with 1B and 8B
            parameters and any size of micro-batches, nanotron's layers take 3 ms for each rank.
        ring_step_seconds: What each step of a tensor parallel ring between nodes takes besides its
            bytes.
        stall_seconds: How much longer each micro-batch may take on several nodes, for reasons that
            its published runs leave open; only the upper end of forecasts includes it.
        selective: The fraction of a layer's forward that selective recomputation repeats; 0 for
            the attention's scores alone.
        missing: How many fewer micro-batches than stages 1F1B may have; None for any number. (Both
            nanotron, `parallel/pipeline_parallel/engine.py`, and torch's `Schedule1F1B` check.)
        cut: "uniform" for equally many layers in each stage; "last" if the remaining layers go
            to the last stages; "cumulative" for stages that end where the cumulative operations,
            the output layer's included, pass an equal share.
        schedules: The schedules that it has for a pipeline, in words of `Plan`; none for all.
        note: A description of the engine.
    """

    name: str
    flash: int
    elementwise: float
    eager: bool
    logit_bytes: int
    split_logit_bytes: int
    gradient_bytes: int
    held_gradient_bytes: int
    reducer_bytes: int
    casts_shards: bool
    headroom: float
    fragments: float
    cached: str
    update_bytes: int
    update_cached_bytes: int
    bucket_bytes: float
    bucket_rank_bytes: float
    overlap: float
    gather_overlap: float
    tensor_overlap: float
    balanced_ring: bool
    ports: int
    expert_overlap: float
    expert_nodes: int
    blocking_messages: bool
    host_seconds: float
    pipeline_rank_seconds: float
    ring_step_seconds: float
    stall_seconds: float
    selective: float
    missing: int | None
    cut: str
    schedules: tuple[str, ...]
    note: str

    def reduced_bytes(self, precision: str) -> int:
        """Return the bytes of an element of a reduced gradient: at least the parameter's."""
        return max(self.gradient_bytes, 4 if precision == "fp32" else 2)


@lru_cache(maxsize=1)
def engines() -> dict[str, Engine]:
    """Return the table of engines, by name."""
    return {
        row["engine"]: Engine(
            row["engine"],
            int(row["flash"]),
            float(row["elementwise"]),
            row["eager"] == "1",
            int(row["logit_bytes"]),
            int(row["split_logit_bytes"]),
            int(row["gradient_bytes"]),
            int(row["held_gradient_bytes"]),
            int(row["reducer_bytes"]),
            row["casts_shards"] == "1",
            float(row["headroom"]),
            float(row["fragments"]),
            row["cached"],
            int(row["update_bytes"]),
            int(row["update_cached_bytes"]),
            float(row["bucket_mb"]) * 1e6,
            float(row["bucket_rank_mb"]) * 1e6,
            float(row["overlap"]),
            float(row["gather_overlap"]),
            float(row["tensor_overlap"]),
            row["balanced_ring"] == "1",
            int(row["ports"]),
            float(row["expert_overlap"]),
            int(row["expert_nodes"]),
            row["blocking_messages"] == "1",
            float(row["host_us"]) * 1e-6,
            float(row["pipeline_rank_us"]) * 1e-6,
            float(row["ring_step_us"]) * 1e-6,
            float(row["stall_s"]),
            float(row["selective"]),
            int(row["missing"]) if row["missing"] else None,
            row["cut"],
            tuple(row["schedules"].split()),
            row["note"],
        )
        for row in rows("engines.csv")
    }
