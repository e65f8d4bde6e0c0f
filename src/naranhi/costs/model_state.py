"""The bytes that a rank holds of a model that ZeRO shards, and the bytes that it sends.

Units: bytes. Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models" (2020).
"""

from math import isfinite

from naranhi.costs.communication import bytes_sent, checked_arguments


def zero_bytes(
    parameters: float, ranks: int, stage: int, precision: str = "bf16", optimizer: str = "adam"
) -> float:
    """Return the bytes of model state on a rank: parameters, gradients and optimizer state.

    Each of them is whole on every rank, or sharded over `ranks` ranks, depending on the stage of
    ZeRO: stage 0 shards nothing (plain data parallelism), 1 the optimizer state, 2 the gradients as
    well, 3 the parameters as well. Activations, padding and buffers are not counted.

    Args:
        parameters: The number of parameters.
        ranks: The number of ranks that share the model state.
        stage: The stage of ZeRO, 0 to 3.
        precision: "bf16" (2 bytes for a parameter and 2 for its gradient, plus an fp32 copy that
            counts as optimizer state) or "fp32" (4 and 4, no copy).
        optimizer: "adam" keeps two fp32 values per parameter, "momentum" one, "sgd" none.

    Raises:
        ValueError: If a name or the stage is unknown, or `parameters` is negative.

    Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
    models" (2020), section 3 and figure 1.
    """
    value, master = _check_zero(parameters, ranks, stage, precision)
    if optimizer not in _OPTIMIZER_STATE:
        raise ValueError(f"optimizer must be one of {sorted(_OPTIMIZER_STATE)}, not {optimizer!r}")
    # In the order in which the stages shard them.
    state = [_OPTIMIZER_STATE[optimizer] + master, value, value]
    return parameters * (sum(state[:stage]) / ranks + sum(state[stage:]))


def zero_bytes_sent(parameters: float, ranks: int, stage: int, precision: str = "bf16") -> float:
    """Return the bytes that each rank sends in a step, and receives.

    That is close to 2 values per parameter, and 3 at stage 3. Gradients are reduce-scattered and
    parameters all-gathered, on a ring, which is the traffic of an all-reduce (stage 0); stage 3
    all-gathers parameters twice, for the forward and for the backward. A value is 2 bytes in
    "bf16" precision and 4 in "fp32". With micro-batches, this is the cost of one reduction and one
    all-gather (of each kind). Arguments, errors and source are those of `zero_bytes`.
    """
    value, _ = _check_zero(parameters, ranks, stage, precision)
    once = bytes_sent("all_gather", parameters * value, ranks)  # a reduce-scatter sends as much
    return (3 if stage == 3 else 2) * once


def hybrid_bytes_sent(
    parameters: float, ranks: int, replicas: int, stage: int, precision: str = "bf16"
) -> tuple[float, float]:
    """Return the bytes that each rank sends in a step of hybrid sharding: (near, far).

    The model is sharded over `ranks` ranks, near each other, and `replicas` such groups hold a copy
    each. Near, that is `zero_bytes_sent`. Far, each rank's shard of the gradients is summed by an
    all-reduce with the ranks that hold the same shard.

    Args:
        parameters: The number of parameters.
        ranks: The number of ranks that share one copy.
        replicas: The number of copies.
        stage: The stage of ZeRO, 0 to 3.
        precision: As for `zero_bytes`.

    Source: Zhao et al., "PyTorch FSDP" (2023), section 3.2.2, on hybrid sharding.
    """
    value, _ = _check_zero(parameters, ranks, stage, precision)
    near = zero_bytes_sent(parameters, ranks, stage, precision)
    shard = parameters * value / (ranks if stage else 1)
    return near, bytes_sent("all_reduce", shard, replicas)


def pipeline_zero_bytes_sent(
    parameters: float,
    ranks: int,
    gathers: int = 1,
    reductions: int = 1,
    precision: str = "bf16",
) -> float:
    """Return the bytes that a rank sends in a step for a sharded stage of a pipeline.

    Each gather of the parameters, and each reduction of the gradients, sends (n - 1) / n of them on
    n ranks. With m micro-batches and whole backwards, a stage that stays gathered is gathered once,
    and one that is freed after every action 2m times; `schedules.transfers` counts both.

    Args:
        parameters: The number of parameters of the stage.
        ranks: The number of ranks that have shards of it.
        gathers: How often they are gathered in a step; at ZeRO-2 also 1, after the step.
        reductions: How often its gradients are reduced.
        precision: As for `zero_bytes`.
    """
    value, _ = _check_zero(parameters, ranks, 3, precision)
    return (gathers + reductions) * bytes_sent("all_gather", parameters * value, ranks)


def pipeline_zero_bytes(
    parameters: float, ranks: int, gathered: float, precision: str = "bf16"
) -> float:
    """Return the bytes of parameters that a rank of a pipeline holds while some are gathered.

    Args:
        parameters: The number of parameters of all stages of the rank, of which it has shards.
        ranks: The number of ranks that have shards of them.
        gathered: How many of them are whole as well; `schedules.gathered` says which stages are.
        precision: As for `zero_bytes`; the copy in fp32 counts as optimizer state.
    """
    value, _ = _check_zero(parameters, ranks, 3, precision)
    return (parameters / ranks + gathered) * value


_OPTIMIZER_STATE = {"adam": 8, "momentum": 4, "sgd": 0}  # bytes per parameter, in fp32
_PRECISION = {"bf16": (2, 4), "fp32": (4, 0)}  # bytes of a value, and of its fp32 copy


def _check_zero(parameters, ranks, stage, precision):
    """Return (bytes of a value, bytes of its fp32 copy), or raise ValueError."""
    checked_arguments(ranks=ranks)
    if not (isfinite(parameters) and parameters >= 0):
        raise ValueError(f"parameters must be at least 0 and finite, not {parameters!r}")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, not {stage!r}")
    if precision not in _PRECISION:
        raise ValueError(f"precision must be one of {sorted(_PRECISION)}, not {precision!r}")
    return _PRECISION[precision]
