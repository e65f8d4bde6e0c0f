"""Forecasts beside published runs, held to bounds, source by source.

Bounds are what was reached, rounded up: a change that makes forecasts worse fails here. Each pair
of GPU and engine is calibrated on one run, which is left out of the errors.
"""

from statistics import mean

import pytest

from naranhi.planning import accuracy
from naranhi.planning.cluster import rows
from naranhi.planning.published import runs, sweep

# source: (mean of absolute errors at most, worst at most), of the seconds of a step
STEPS = {
    "Korthikanti 2022": (0.0365, 0.089),
    "Megatron SC'21": (0.045, 0.07),
    "Llama 3 paper": (0.04, 0.06),
    "IBM fms-fsdp": (0.04, 0.10),
    "InternEvo throughput": (0.05, 0.16),
    "InternEvo flops": (0.065, 0.16),
    "Zero Bubble": (0.05, 0.12),
    "llm-foundry": (0.05, 0.25),
    # Long contexts, whose ring attention was not balanced; DeepSpeed of 2021 on one network port.
    "torchtitan 2024-12": (0.15, 0.40),
    "Megatron SC'21 T2": (0.23, 0.66),
}
MEMORY = {
    "Korthikanti 2022 Fig 1 (via Calculon)": (0.03, 0.03),
    "Zero Bubble": (0.04, 0.09),
    "torchtitan 2024-12": (0.22, 0.38),
    "HF Ultra-Scale sweep": (0.13, 1.8),
    # Twice the bytes for each parameter that any other source has, and no reason given.
    "InternEvo memory": (0.51, 0.60),
}


@pytest.fixture(scope="module")
def errors():
    compared = accuracy.by_source(accuracy.comparisons())
    compared += accuracy.by_source(accuracy.sweep_comparisons())
    return {(row.source, row.what): row for row in compared}


def test_all_published_runs_are_there():
    assert len(runs()) == 402 and len(sweep()) == 1641
    assert sum(run.failed for run in sweep()) == 614


@pytest.mark.parametrize("source", STEPS)
def test_steps_take_as_long_as_published(errors, source):
    row = errors[source, "step"]
    most, worst = STEPS[source]
    assert row.mean <= most and abs(row.worst) <= worst, row


@pytest.mark.parametrize("source", MEMORY)
def test_ranks_hold_as_much_as_published(errors, source):
    row = errors[source, "memory"]
    most, worst = MEMORY[source]
    assert row.mean <= most and abs(row.worst) <= worst, row


def test_every_source_has_its_bound(errors):
    # The sweep's seconds are judged by what they choose: a tenth of its runs took ten times too
    # long, which nothing in its table explains.
    assert set(errors) - {("HF Ultra-Scale sweep", "step")} == {
        *((source, "step") for source in STEPS),
        *((source, "memory") for source in MEMORY),
    }


def test_nine_of_ten_published_runs_are_inside_their_interval():
    inside = [c.inside for c in accuracy.comparisons() if c.seconds_error is not None]
    assert len(inside) > 350
    assert mean(inside) >= 0.9


def test_an_interval_is_not_so_wide_that_it_says_nothing():
    widths = [c.forecast.high / c.forecast.low for c in accuracy.comparisons() if c.run.seconds]
    assert mean(widths) < 1.4


def test_the_sweep_fits_or_fails_as_forecast():
    """Of 614 failures about 45 crashed with memory to spare, which no forecast can know."""
    assert accuracy.fits_right(accuracy.sweep_comparisons()) >= 0.935


def test_what_the_forecasts_choose_is_among_the_best():
    """Up to 64 GPUs. On more, pipelines of tensor parallel ranks took two to thirty times as long
    as the same layers without a pipeline, in this sweep and in no other source."""
    choices = accuracy.choices()
    assert len(choices) == 14
    small = [choice.regret for choice in choices if choice.gpus <= 64]
    assert sorted(small)[-2] <= 0.10  # of eight; one more crashed with memory to spare
    assert sum(choice.regret <= 0.10 for choice in choices) >= 9


def test_each_efficiency_follows_from_the_run_that_it_names():
    published = {(run.source, run.name): run for run in (*runs(), *sweep()) if run.seconds}
    table = rows("calibrations.csv")
    assert len({(row["gpu"], row["engine"]) for row in table}) == len(table)
    for row in table:
        run = published[row["source"], row["run"]]
        assert (run.cluster.gpu, run.cluster.engine) == (row["gpu"], row["engine"])
        assert accuracy.calibrate(run) == pytest.approx(float(row["efficiency"]), abs=2e-4)


def test_runs_have_names_that_tell_them_apart():
    named = [(run.source, run.name) for run in runs() if run.seconds]
    calibrated = [(row["source"], row["run"]) for row in rows("calibrations.csv")]
    assert all(named.count(name) <= 1 for name in calibrated)


def test_the_table_has_each_source():
    text = accuracy.table()
    assert all(source in text for source in (*STEPS, *MEMORY))
    assert "fits or fails, rightly" in text
