"""Where to cut a model into stages: find exactly the split whose slowest stage is fastest.

A pipeline runs at the pace of its slowest stage, and equal numbers of layers do not take equal
time. `naranhi.pipeline.profile` measures the time of each layer; this module only does the
arithmetic. A split is a *balance*, the number of layers of each virtual stage, as
`pipeline.Pipeline` takes it.

Source: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training" (2019),
section 3.1, without its replicated stages. Units: seconds, bytes.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from numbers import Real
from operator import index
from typing import NamedTuple

from naranhi.schedules.schedule import require_positive


class LayerProfile(NamedTuple):
    """The measured cost of one layer, for one micro-batch.

    Attributes:
        name: The name of the layer.
        forward: Seconds of the forward.
        backward: Seconds of the backward.
        output_bytes: Bytes of the output, which is the input of the next layer.
        saved_bytes: Bytes of the activations that the layer keeps for its backward.
        parameter_bytes: Bytes of the layer's weights.
    """

    name: str
    forward: float
    backward: float
    output_bytes: int
    saved_bytes: int
    parameter_bytes: int


def uniform(profile: Sequence[LayerProfile], stages: int) -> list[int]:
    """Return a balance with equally many layers per stage, whatever the layers cost.

    If the layers do not divide evenly, each of the first stages has one layer more.
    """
    _check_stages(profile, stages)
    each, more = divmod(len(profile), stages)
    return [each + (stage < more) for stage in range(stages)]


def by_size(profile: Sequence[LayerProfile], stages: int) -> list[int]:
    """Return the balance whose largest stage, in bytes of parameters, is smallest."""
    _check_stages(profile, stages)
    sizes = [_size(place, layer, "parameter_bytes") for place, layer in enumerate(profile)]
    return split_for(sizes, [0] * len(profile), stages)


def balanced(
    profile: Sequence[LayerProfile],
    stages: int,
    bandwidth: float | None = None,
    latency: float = 0.0,
) -> list[int]:
    """Return the balance whose slowest stage or link is fastest: the one with the least `slowest`.

    If several balances are equally fast, the same one is always returned. The running time grows
    with stages x layers^2.

    Args:
        profile: One `LayerProfile` per layer.
        stages: The number of virtual stages.
        bandwidth: Of the link between two stages, in bytes per second. None means a link so fast
            that the bytes of a message take no time.
        latency: Seconds that each message takes in addition.

    Raises:
        ValueError: If there are more stages than layers or fewer than one; if the bandwidth is not
            a positive finite number, or the latency is negative or not finite; and, naming the
            layer, if a time is missing (None), zero, negative or not finite, or a number of bytes
            is missing or negative where it is needed.
    """
    _check_stages(profile, stages)
    times = [_seconds(place, layer) for place, layer in enumerate(profile)]
    return split_for(times, _links(profile, bandwidth, latency), stages)


def slowest(
    profile: Sequence[LayerProfile],
    balance: Sequence[int],
    bandwidth: float | None = None,
    latency: float = 0.0,
) -> float:
    """Return the least seconds between one micro-batch and the next, with one stage per rank.

    A stage takes the sum of its layers' forwards and backwards. A link between two stages takes
    2 (output_bytes / bandwidth + latency): an activation in one direction, and a gradient of equal
    size in the other. Links work while stages compute, so the slowest stage or link sets the pace,
    and not the sum. This is the model of PipeDream (its section 3.1). Where moving bytes costs the
    ranks' own time, as with sockets on a busy CPU, the true time lies between the maximum and the
    sum.

    Args:
        profile: As for `balanced`.
        balance: The number of layers of each virtual stage.
        bandwidth: As for `balanced`.
        latency: As for `balanced`.

    Raises:
        ValueError: As `balanced` does, and if the balance does not fit the profile.
    """
    ends = _ends(profile, balance)
    times = [_seconds(place, layer) for place, layer in enumerate(profile)]
    links = _links(profile, bandwidth, latency)
    stages = [sum(times[end - size : end]) for size, end in zip(balance, ends, strict=True)]
    return max(*stages, *(links[end] for end in ends[:-1]), 0)


def stage_times(
    profile: Sequence[LayerProfile], balance: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return the seconds of each stage: (forwards, backwards), two lists as `simulate` takes them.

    Raises:
        ValueError: If the balance does not fit the profile, or for a time as in `balanced`.
    """
    for place, layer in enumerate(profile):
        _seconds(place, layer)
    parts = [
        profile[end - size : end]
        for size, end in zip(balance, _ends(profile, balance), strict=True)
    ]
    return (
        [sum(layer.forward for layer in part) for part in parts],
        [sum(layer.backward for layer in part) for part in parts],
    )


def split_for(weights: Sequence[float], links: Sequence[float], stages: int) -> list[int]:
    """Return the balance with the smallest maximum of its stages' sums and the links that it cuts.

    Dynamic programming: the best split of the first layers into k stages is the best split of fewer
    of these layers into k - 1 stages, plus one more stage.

    Args:
        weights: The cost of each layer.
        links: `links[i]` is the cost of a cut before layer i.
        stages: The number of stages.
    """
    layers, sums = len(weights), [0, *accumulate(weights)]
    best = {0: (0, ())}  # by the number of layers assigned: the maximum, the balance
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (max(worst, links[start], sums[end] - sums[start]), (*balance, end - start))
                for start, (worst, balance) in best.items()
                if start < end
            )
            for end in range(stage, layers - (stages - stage) + 1)
        }
    return list(best[layers][1])


def _links(profile, bandwidth, latency):
    """Return the seconds that a cut before each layer costs; 0 before the first layer."""
    if bandwidth is not None and not _is_time(bandwidth):
        raise ValueError(f"bandwidth is in bytes per second, above 0, not {bandwidth!r}")
    if latency != 0 and not _is_time(latency):
        raise ValueError(f"latency is a time in seconds, 0 or more, not {latency!r}")
    if bandwidth is None:
        return [0, *[2 * latency] * (len(profile) - 1)]
    sizes = [_size(place, layer, "output_bytes") for place, layer in enumerate(profile[:-1])]
    return [0, *(2 * (size / bandwidth + latency) for size in sizes)]


def _seconds(place, layer):
    """Return the seconds of a layer's forward and backward together."""
    for what in ("forward", "backward"):
        time = getattr(layer, what)
        if not _is_time(time):
            raise ValueError(
                f"layer {place} ({layer.name}): {what} must be a time above 0 s, not {time!r}"
            )
    return layer.forward + layer.backward


def _size(place, layer, what):
    size = getattr(layer, what)
    if not (hasattr(size, "__index__") and index(size) >= 0):
        raise ValueError(
            f"layer {place} ({layer.name}): {what} must be a number of bytes, not {size!r}"
        )
    return index(size)


def _is_time(value):
    return isinstance(value, Real) and isfinite(value) and value > 0


def _check_stages(profile, stages):
    require_positive(stages=stages)
    if stages > len(profile):
        raise ValueError(f"more stages than layers: {stages} stages, {len(profile)} layers")


def _ends(profile, balance):
    """Return, for each stage, the number of layers up to its end."""
    if not balance or min(balance) < 1 or sum(balance) != len(profile):
        raise ValueError(
            f"the balance {list(balance)} does not cut {len(profile)} layers: it needs numbers of "
            "at least 1 with that sum"
        )
    return list(accumulate(balance))
