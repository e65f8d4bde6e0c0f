"""How often to save, and what trains: the closed forms against trainings that fail at random."""

import random
from math import exp, inf, sqrt

import pytest

from naranhi import costs


def measured(interval, save, restart, failure, segments, seed):
    """The goodput of a training that fails at random: simulated, failure by failure."""
    order = random.Random(seed)
    clock, left = 0.0, order.expovariate(1 / failure)  # until the next failure
    for _ in range(segments):
        needed = interval + save
        while left < needed:
            clock += left
            left, needed = order.expovariate(1 / failure), restart + interval + save
        clock, left = clock + needed, left - needed
    return segments * interval / clock


@pytest.mark.parametrize(
    "interval, save, restart, failure",
    [(100, 10, 0, 1000), (300, 60, 120, 1000), (50, 100, 400, 300), (2000, 5, 30, 1000)],
)
def test_goodput_is_that_of_trainings_that_fail_at_random(interval, save, restart, failure):
    expected = costs.goodput(interval, save, restart, failure)
    runs = [measured(interval, save, restart, failure, 4000, seed) for seed in range(5)]
    assert sum(runs) / 5 == pytest.approx(expected, rel=0.02)
    another = costs.goodput(interval, save, restart + 0.1 * failure, failure)
    assert another != pytest.approx(expected, rel=0.04), "or the tolerance tells nothing apart"


def test_goodput_by_hand():
    """Without failures only the saves cost; with M = 1, t + d = ln 2 and R = 0: t / (2 - 1)."""
    assert costs.goodput(90, 10, 1000, inf) == 0.9
    assert costs.goodput(0.5, 0.6931471805599453 - 0.5, 0, 1) == pytest.approx(0.5)
    assert costs.goodput(1e6, 0, 0, 1) == 0.0, "hopeless, and no overflow"


def best(save, failure):
    """The interval t with the most goodput: 1 - t/M = e^(-(t+d)/M), by bisection."""
    low, high = 0.0, failure
    for _ in range(200):
        middle = (low + high) / 2
        if 1 - middle / failure > exp(-(middle + save) / failure):
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize(
    "save, failure, bound", [(1, 1e6, 1e-6), (30, 3600, 1e-4), (600, 3600, 0.002), (1, 1, 0.02)]
)
def test_the_refined_interval_is_nearly_the_best(save, failure, bound):
    exact, refined = best(save, failure), costs.checkpoint_interval(save, failure)
    young = costs.checkpoint_interval(save, failure, refined=False)
    assert young == sqrt(2 * save * failure)
    assert refined == pytest.approx(exact, rel=bound)
    assert abs(refined - exact) < abs(young - exact) / 10
    for restart in 0, failure / 10:  # it does not matter for the interval
        most = costs.goodput(exact, save, restart, failure)
        assert most > costs.goodput(exact * 1.1, save, restart, failure)
        assert most > costs.goodput(exact / 1.1, save, restart, failure)


@pytest.mark.parametrize("hours, minutes", [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_intervals_of_dalys_figures(hours, minutes):
    """Figures 3 to 5 of the paper, for saves of 5 minutes."""
    refined = costs.checkpoint_interval(5 * 60, hours * 3600) / 60
    assert refined == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def test_where_the_series_ends():
    assert costs.checkpoint_interval(2000, 1000) == costs.checkpoint_interval(9000, 1000) == 1000
    assert costs.checkpoint_interval(10, inf) == inf
    # The series at d = 2M is sqrt(4 M^2) (1 + 1/3 + 1/9) - 2M: above M by less than 0.9 M.
    assert costs.checkpoint_interval(1999.999, 1000) == pytest.approx(8000 / 9, rel=1e-4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: costs.checkpoint_interval(0, 10), "save_seconds must be above 0 and finite"),
        (lambda: costs.checkpoint_interval(inf, 10), "save_seconds must be above 0 and finite"),
        (lambda: costs.checkpoint_interval(1, -1), "failures must be above 0, not -1"),
        (lambda: costs.goodput(0, 1, 1, 10), "interval must be above 0"),
        (lambda: costs.goodput(inf, 1, 1, 10), "interval must be above 0 and finite, not inf"),
        (lambda: costs.goodput(1, -1, 1, 10), "save_seconds must be at least 0 and finite, not -1"),
        (lambda: costs.goodput(1, 1, inf, 10), "restart_seconds must be at least 0 and finite"),
        (
            lambda: costs.goodput(1, 1, 1, float("nan")),
            "mean_time_between_failures must be above 0, not",
        ),
    ],
)
def test_times_that_make_no_sense_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
