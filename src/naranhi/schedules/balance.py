"""Where to cut a model into stages: the split whose slowest stage is fastest, found exactly.

A pipeline goes at the pace of its slowest stage, and layers of equal number are not layers of equal
time. What each layer takes is measured (`naranhi.pipeline.profile`); here is only arithmetic on it.
A split is a *balance*, the number of layers of each virtual stage, as `pipeline.Pipeline` takes it.

Source: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training" (2019),
section 3.1, without its replicated stages. Units: seconds, bytes.
"""

from itertools import accumulate
from math import isfinite
from numbers import Real
from typing import NamedTuple


class LayerProfile(NamedTuple):
    """What one layer takes, for one micro-batch.

    forward, backward: seconds. output_bytes: of what it hands to the next layer. saved_bytes: of
    the activations that it keeps for its backward. parameter_bytes: of its weights.
    """

    name: str
    forward: float
    backward: float
    output_bytes: int
    saved_bytes: int
    parameter_bytes: int


def uniform(profile, stages):
    """As many layers for each stage, whatever they take; the first ones get one more."""
    _check_stages(profile, stages)
    each, more = divmod(len(profile), stages)
    return [each + (stage < more) for stage in range(stages)]


def by_size(profile, stages):
    """The balance whose largest stage, in bytes of parameters, is smallest."""
    _check_stages(profile, stages)
    sizes = [_size(place, layer, "parameter_bytes") for place, layer in enumerate(profile)]
    return split_for(sizes, [0] * len(profile), stages)


def balanced(profile, stages, bandwidth=None, latency=0.0):
    """The balance whose slowest stage or link is fastest: the smallest `slowest` there is.

    profile: a list of `LayerProfile`s. stages: the number of virtual stages.
    bandwidth: of the link between two stages, in bytes per second; None takes it as so fast that
    messages take no time. latency: seconds that each message takes besides.

    Of several such balances always the same one is found. The time grows with stages x layers^2.

    Raises ValueError for more stages than layers or fewer than one; for a bandwidth or a latency
    that makes no sense; and, naming the layer, for a time that is missing (None), zero, negative or
    not finite, or a number of bytes that is missing or negative where it is needed.
    """
    _check_stages(profile, stages)
    times = [_seconds(place, layer) for place, layer in enumerate(profile)]
    return split_for(times, _links(profile, bandwidth, latency), stages)


def slowest(profile, balance, bandwidth=None, latency=0.0):
    """Seconds between one micro-batch and the next: with a stage on each rank, none has fewer.

    A stage takes the sum of its layers' forwards and backwards. A link between two stages takes
    2 (output_bytes / bandwidth + latency), for an activation one way and a gradient as large the
    other way. Links work while stages compute, so the slowest of all sets the pace, and not a sum:
    the model of PipeDream (its section 3.1). Where moving bytes costs the ranks' own time, as with
    sockets on a busy CPU, the truth lies between the maximum and the sum.

    Raises ValueError as `balanced` does, and for a balance that does not fit.
    """
    ends = _ends(profile, balance)
    times = [_seconds(place, layer) for place, layer in enumerate(profile)]
    links = _links(profile, bandwidth, latency)
    stages = [sum(times[end - size : end]) for size, end in zip(balance, ends, strict=True)]
    return max(*stages, *(links[end] for end in ends[:-1]), 0)


def stage_times(profile, balance):
    """Seconds of each stage: (forwards, backwards), two lists as `simulate` takes them.

    Raises ValueError for a balance that does not fit, and for times as `balanced` does.
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


def split_for(weights, links, stages):
    """The balance with the smallest maximum over its parts' sums and the links that it cuts.

    links[i]: what it costs to cut before layer i. Dynamic programming: the best split of the first
    layers into k parts is the best split of fewer of them into k - 1, and one part more.
    """
    layers, sums = len(weights), [0, *accumulate(weights)]
    best = {0: (0, ())}  # by the number of layers that have a place: the maximum, the balance
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
    """What it takes to cut before each layer, in seconds; nothing before the first."""
    if bandwidth is not None and not _is_time(bandwidth):
        raise ValueError(f"bandwidth is in bytes per second, above 0, not {bandwidth!r}")
    if latency != 0 and not _is_time(latency):
        raise ValueError(f"latency is a time in seconds, 0 or more, not {latency!r}")
    if bandwidth is None:
        return [0, *[2 * latency] * (len(profile) - 1)]
    sizes = [_size(place, layer, "output_bytes") for place, layer in enumerate(profile[:-1])]
    return [0, *(2 * (size / bandwidth + latency) for size in sizes)]


def _seconds(place, layer):
    """A layer's forward and backward together."""
    for what in ("forward", "backward"):
        time = getattr(layer, what)
        if not _is_time(time):
            raise ValueError(
                f"layer {place} ({layer.name}): {what} must be a time above 0 s, not {time!r}"
            )
    return layer.forward + layer.backward


def _size(place, layer, what):
    size = getattr(layer, what)
    if not (isinstance(size, int) and size >= 0):
        raise ValueError(
            f"layer {place} ({layer.name}): {what} must be a number of bytes, not {size!r}"
        )
    return size


def _is_time(value):
    return isinstance(value, Real) and isfinite(value) and value > 0


def _check_stages(profile, stages):
    if not isinstance(stages, int) or stages < 1:
        raise ValueError(f"stages must be a whole number of at least 1, not {stages!r}")
    if stages > len(profile):
        raise ValueError(f"more stages than layers: {stages} stages, {len(profile)} layers")


def _ends(profile, balance):
    """For each stage, the number of layers up to its end."""
    if not balance or min(balance) < 1 or sum(balance) != len(profile):
        raise ValueError(f"the balance {list(balance)} does not cut {len(profile)} layers")
    return list(accumulate(balance))
