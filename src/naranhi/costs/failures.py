"""How often to save a checkpoint, and what fraction of the time is then spent on training.

Failures are independent of one another and of the training, at a constant rate: the time to the
next one is exponentially distributed. A failure costs everything since the last checkpoint, and the
restart, during which there may be another failure. Units: seconds.

Sources: Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A
higher order estimate of the optimum checkpoint interval for restart dumps" (2006).
"""

from math import exp, expm1, inf, sqrt


def checkpoint_interval(
    save_seconds: float, mean_time_between_failures: float, *, refined: bool = True
) -> float:
    """Return how many seconds to train between two saves so that a training run ends soonest.

    With save time d and mean time between failures M, Young's approximation is sqrt(2dM). Too few
    saves cost rework after a failure, too many cost the saves: the sum of both is smallest there.
    Daly's refinement subtracts d, and adds what Young leaves out because d is small beside M:
    sqrt(2dM) (1 + x/3 + x^2/9) - d, with x = sqrt(d / 2M). From d = 2M on, it is M.

    Args:
        save_seconds: How long a save keeps the training waiting.
        mean_time_between_failures: Of the whole machine; with n nodes, an n-th of a node's.
        refined: Whether to return Daly's refinement instead of Young's approximation.

    Raises:
        ValueError: If a time is not above 0, or the save's is not finite.

    Source: Young (1974); Daly (2006).
    """
    save, failure = save_seconds, mean_time_between_failures
    _require_above_zero(save_seconds=save, mean_time_between_failures=failure)
    if failure == inf:
        return inf
    young = sqrt(2 * save * failure)
    if not refined:
        return young
    if save >= 2 * failure:
        return failure
    ratio = sqrt(save / (2 * failure))
    return young * (1 + ratio / 3 + ratio**2 / 9) - save


def goodput(
    interval: float,
    save_seconds: float,
    restart_seconds: float,
    mean_time_between_failures: float,
) -> float:
    """Return the fraction of the time spent on training whose result is kept.

    With interval t, save time d, restart time R and mean time between failures M, it takes
    M e^(R/M) (e^((t+d)/M) - 1) seconds on average to train for t seconds and save.

    Args:
        interval: The seconds of training between two saves.
        save_seconds: How long a save keeps the training waiting.
        restart_seconds: The time from a failure to the first step of the next attempt.
        mean_time_between_failures: Of the whole machine; `inf` for one that never fails.

    Raises:
        ValueError: If a time is negative, `interval` or the mean 0, or any but the mean infinite.

    Source: Daly (2006).
    """
    failure = mean_time_between_failures
    _require_above_zero(interval=interval, mean_time_between_failures=failure)
    for name, seconds in {"save": save_seconds, "restart": restart_seconds}.items():
        if not 0 <= seconds < inf:
            raise ValueError(f"{name}_seconds must be at least 0 and finite, not {seconds!r}")
    if failure == inf:
        return interval / (interval + save_seconds)
    # exp(-a) / expm1(b) = exp(-a - b) / -expm1(-b), which does not overflow.
    attempt = (interval + save_seconds) / failure
    return interval / failure * exp(-restart_seconds / failure - attempt) / -expm1(-attempt)


def _require_above_zero(**seconds):
    for name, value in seconds.items():
        may_be_infinite = name == "mean_time_between_failures"
        if not value > 0 or (value == inf and not may_be_infinite):
            bounds = "above 0" if may_be_infinite else "above 0 and finite"
            raise ValueError(f"{name} must be {bounds}, not {value!r}")
