"""What a rank holds of a model that ZeRO shards, and what it sends.

Units: bytes. Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models" (2020).
"""

from math import isfinite

from naranhi.costs.communication import _check, bytes_sent


def zero_bytes(parameters, ranks, stage, precision="mixed", optimizer="adam"):
    """Bytes of model state that a rank holds: parameters, gradients and the optimizer's state.

    Each is whole on every rank, or a `ranks`-th of it, by the stage of ZeRO: 0 shards nothing
    (plain data parallelism), 1 the optimizer's state, 2 gradients as well, 3 parameters as well.
    Activations, padding and buffers are not counted.

    parameters: how many. precision: "mixed" (2 bytes for a parameter and for its gradient, and with
    the optimizer a copy in fp32) or "fp32" (4 and 4, no copy). optimizer: "adam" keeps two fp32
    numbers a parameter, "momentum" one, "sgd" none.

    Raises ValueError for other names, another stage, a negative number of parameters.
    Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
    models" (2020), section 3 and figure 1.
    """
    value, master = _check_zero(parameters, ranks, stage, precision)
    if optimizer not in _OPTIMIZER_STATE:
        raise ValueError(f"optimizer must be one of {sorted(_OPTIMIZER_STATE)}, not {optimizer!r}")
    # In the order in which the stages shard them.
    state = [_OPTIMIZER_STATE[optimizer] + master, value, value]
    return parameters * (sum(state[:stage]) / ranks + sum(state[stage:]))


def zero_bytes_sent(parameters, ranks, stage, precision="mixed"):
    """Bytes that each rank sends in a step, and receives: close to 2 values a parameter, 3 at
    stage 3.

    Gradients are reduce-scattered and parameters all-gathered, on a ring, which is an all-reduce's
    traffic (stage 0); stage 3 gathers parameters twice, for the forward and for the backward. A
    value is 2 bytes in "mixed" precision and 4 in "fp32". With micro-batches, this is what one
    reduction and one gathering (of each kind) cost. Raises and source: as `zero_bytes`.
    """
    value, _ = _check_zero(parameters, ranks, stage, precision)
    once = bytes_sent("all_gather", parameters * value, ranks)  # a reduce-scatter sends as much
    return (3 if stage == 3 else 2) * once


_OPTIMIZER_STATE = {"adam": 8, "momentum": 4, "sgd": 0}  # bytes a parameter, in fp32
_PRECISION = {"mixed": (2, 4), "fp32": (4, 0)}  # bytes of a value, and of its fp32 copy


def _check_zero(parameters, ranks, stage, precision):
    """(bytes of a value, bytes of its fp32 copy), or ValueError."""
    _check(ranks=ranks)
    if not (isfinite(parameters) and parameters >= 0):
        raise ValueError(f"parameters must be how many there are, not {parameters!r}")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, not {stage!r}")
    if precision not in _PRECISION:
        raise ValueError(f"precision must be one of {sorted(_PRECISION)}, not {precision!r}")
    return _PRECISION[precision]
