"""Forecasts beside published runs, held to bounds, source by source.

Bounds are what was reached, rounded up: a change that makes forecasts worse fails here. Each pair
of GPU and engine is calibrated on one run, which is left out of the errors.
"""

from dataclasses import replace
from math import exp, log
from statistics import mean, median

import pytest

from naranhi.planning import accuracy
from naranhi.planning.communication import NETWORK
from naranhi.planning.published import independent, runs, sweep
from naranhi.planning.tables import rows

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
    "torchtitan 2024-12": (0.08, 0.20),
    "Megatron SC'21 T2": (0.07, 0.14),
}
# Of other sources, in which no constant was chosen, except efficiencies by two runs of DGX Cloud.
# Megatron Bridge's are all runs of dense models with fp8 in one scale a tensor on GPUs of
# `gpus.csv` (not GB300), without those that by their scripts move activations to the host, or
# recompute some layers: no `Plan` says that.
INDEPENDENT = {
    "DGX Cloud": (0.055, 0.15),
    "Megatron Bridge": (0.04, 0.11),
    "BLOOM": (0.04, 0.04),
    "MT-NLG": (0.16, 0.18),
    "Nemotron-4": (0.07, 0.08),
    "DeepSeek-V3": (0.16, 0.16),
    # The generation of the attention was chosen by these, whose sequences have up to a million
    # tokens, and holds for the next: both are all of a table on pre-training.
    "NeMo 24.03": (0.05, 0.10),
    "NeMo 24.07": (0.06, 0.14),
    # Long sequences, experts in one node: 1 to 10%. The others take from a third less to two thirds
    # more: shorter sequences, and gathers of FSDP behind large micro-batches.
    "Megatron MoE ModelZoo": (0.21, 0.70),
}
# The others' published times are all inside the intervals.
OUTSIDE = {"Megatron MoE ModelZoo": 1}
MEMORY = {
    "Korthikanti 2022 Fig 1 (via Calculon)": (0.01, 0.02),
    "Zero Bubble": (0.023, 0.07),
    # The worst: seven pipelines of 405B whose ranks hold the same bytes, 72.7 to 84.9 GiB.
    "torchtitan 2024-12": (0.031, 0.12),
    # Half of them are within 7%. The worst are tensor groups over nodes: what their allocator keeps
    # depends on how far its host is ahead, which later runs, on a slower network, were not.
    "HF Ultra-Scale sweep": (0.11, 2.6),
    # The worst is a pipeline of 16 stages: 28 bytes for each parameter, where those of 4, 5 and 6
    # stages have 34.
    "InternEvo memory": (0.033, 0.18),
}


@pytest.fixture(scope="module")
def errors():
    compared = accuracy.by_source(accuracy.comparisons())
    compared += accuracy.by_source(accuracy.sweep_comparisons())
    return {(row.source, row.what): row for row in compared}


def test_all_published_runs_are_there():
    assert len(runs()) == 402 and len(sweep()) == 1641
    assert sum(run.failed for run in sweep()) == 614
    assert sum(run.crashed for run in sweep()) == 244


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


@pytest.mark.parametrize("source", INDEPENDENT)
def test_steps_of_runs_by_which_nothing_was_chosen_take_as_long(source):
    row = next(
        row
        for row in accuracy.by_source(accuracy.independent_comparisons())
        if row.source == source
    )
    most, worst = INDEPENDENT[source]
    assert row.mean <= most and abs(row.worst) <= worst, row
    assert round(row.runs * (1 - row.inside)) == OUTSIDE.get(source, 0), row


def test_runs_that_ran_are_forecast_to_fit():
    """Exceptions: Llama 3 405B on 16,384, whose engine freed what it no longer needed; a 70B whose
    recomputation is not printed; ZeRO-3 of 530B. Korthikanti's figure 1 is computed, not run."""
    ran = [c for c in accuracy.comparisons() if c.run.seconds]
    wrong = [(c.run.source, c.run.name) for c in ran if not c.forecast.fits]
    assert len(ran) > 350 and len(wrong) == 5, wrong
    assert accuracy.held(accuracy.comparisons()) == 1 - len(wrong) / len(ran)


def test_runs_by_which_nothing_was_chosen_are_forecast_to_fit():
    """Exceptions: Nemotron-4 340B with only two data parallel ranks, by 7 GiB; DeepSeek-V3, which
    recomputes norms and up-projections, and keeps activations in fp8 and moments in bf16; Llama
    405B in 16 stages of four chunks, by 26 GiB; Qwen3 with long sequences, which recomputes norms
    and experts."""
    compared = accuracy.independent_comparisons()
    wrong = [c.run.name for c in compared if not c.forecast.fits]
    assert len(compared) > 50 and mean(c.inside for c in compared) >= 0.9
    assert wrong == [
        "671B on 2048",
        "Nemotron-4 340B bf16 on 128",
        "Nemotron-4 340B fp8 on 128",
        "Llama 3.1 405B on 256 GB200",
        *(f"235B, {thousand}k tokens" for thousand in (16, 32, 64, 128)),
    ]


def test_every_source_has_its_bound(errors):
    # The sweep's seconds are judged by what they choose: a tenth of its runs took ten times too
    # long. Of 512 GPUs, a slow network and a defect since mended explain a part of it.
    assert set(errors) - {("HF Ultra-Scale sweep", "step")} == {
        *((source, "step") for source in STEPS),
        *((source, "memory") for source in MEMORY),
    }


def test_nine_of_ten_published_runs_are_inside_their_interval():
    inside = [c.inside for c in accuracy.comparisons() if c.seconds_error is not None]
    assert len(inside) > 350
    assert mean(inside) >= 0.9
    swept = [c.inside for c in accuracy.sweep_comparisons() if c.seconds_error is not None]
    assert len(swept) > 1000 and mean(swept) >= 0.9


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_half_of_the_sweeps_pipelines_are_forecast_within_a_fifth(tp):
    """On 16 to 128 GPUs: on more, most stalled for a second in each micro-batch, see `Engine`."""
    errors = [
        abs(c.seconds_error)
        for c in accuracy.sweep_comparisons()
        if c.seconds_error is not None
        and c.run.plan.pp > 1
        and c.run.plan.tp == tp
        and 16 <= c.run.cluster.gpus <= 128
    ]
    assert len(errors) > 60 and median(errors) < 0.2


def test_an_interval_is_not_so_wide_that_it_says_nothing():
    widths = [c.forecast.high / c.forecast.low for c in accuracy.comparisons() if c.run.seconds]
    assert mean(widths) < 1.4


def test_the_sweep_fits_or_fails_as_forecast():
    """Of 1,397 runs that ran or ran out of memory, 97.9%: by a limit that leaves 8% free, as for
    Megatron-Core, and a quarter of what comes and goes in a micro-batch to free pieces. (Of all
    1,641, if those that ended otherwise are said not to fit, 94.5%.) The fullest run left 2% of
    79.1 GiB, with blocks that were free."""
    assert accuracy.fits_right(accuracy.sweep_comparisons()) >= 0.97


def test_runs_that_ended_otherwise_are_known_or_are_slips():
    """244 runs ended with an error that was no lack of memory. Of these 179 are refused: a stage
    would be empty, or too few micro-batches would be on their way. No other run had so few.

    Of the others 11 are slips of a script, which wrote "16.0" for the number of micro-batches; nine
    of these plans ran when they were submitted again. And 31 are jobs 14018427 to 14018472 of the
    1B, pipelines with ZeRO-0, of which not one ran, whatever its size and its micro-batches."""
    ended = [c for c in accuracy.sweep_comparisons() if c.run.crashed]
    assert len(ended) == 244 and sum(c.forecast is None for c in ended) == 179

    def few(run):
        return run.plan.microbatches(run.global_batch) < run.plan.pp - 1

    assert sum(few(run) for run in sweep()) == sum(few(c.run) for c in ended) == 105


def test_failures_that_no_memory_explains_are_no_lack_of_memory():
    """Of the 1B on 2 to 8 nodes, all pipelines over data parallel ranks failed that have 16 or more
    micro-batches of one sequence and ZeRO-0, at 2 to 29 GB: of another cause, their source says."""
    block = [
        c.run
        for c in accuracy.sweep_comparisons()
        if c.forecast
        and c.run.model.layers == 16
        and c.run.cluster.gpus // 8 in (2, 4, 8)
        and c.run.plan.pp > 1
        and c.run.plan.dp > 1
        and (c.run.plan.microbatch, c.run.plan.zero) == (1, 0)
        and c.run.global_batch // c.run.plan.dp >= 16
    ]
    assert len(block) == 24 and all(run.crashed for run in block)


def test_what_the_forecasts_choose_is_among_the_best():
    """Of 16 choices none failed, and 14 are within a tenth of the best; the other two are on 512
    GPUs, see `test_on_512_gpus_a_forecast_has_to_be_told_the_network`."""
    choices = accuracy.choices()
    assert len(choices) == 16 and not any(choice.picked.failed for choice in choices)
    assert all(choice.regret <= 0.10 for choice in choices if choice.gpus <= 256)
    assert sum(choice.regret <= 0.10 for choice in choices) == 14


def test_on_512_gpus_a_forecast_has_to_be_told_the_network():
    """There 129 of 149 jobs measured all-reduces of 12 to 14 GB/s before they trained, the others
    of 162 to 190. The best run of the 8B was one of the others; that of the 1B was its one pipeline
    from after a defect was mended. Of the 41 runs under such conditions, forecasts are off by a
    factor of 1.5 on average if they are told what their job measured, and of 2.4 if not.

    The choices, of six and ten runs of the 1B and of fifteen and ten of the 8B, are in the order of
    models and networks. Two are not good: 40% and 20% from the best."""
    runs_512 = [run for run in sweep() if run.cluster.gpus == 512 and run.seconds]
    assert len(runs_512) == 149 and sum(run.flawed for run in runs_512) == 108
    networks = sorted(run.cluster.network * NETWORK for run in runs_512)
    assert networks[0] > 12 and networks[128] < 14.1
    assert networks[129] > 161 and networks[-1] < 191
    regrets = [choice.regret for choice in accuracy.choices() if choice.gpus == 512]
    assert regrets == pytest.approx([0.0, 0.399, 0.201, 0.0], abs=0.001)
    like = [run for run in runs_512 if not run.flawed]
    told, untold = ([accuracy.compare(run) for run in own] for own in (like, map(_nominal, like)))
    assert _factor(told) < 1.5 and _factor(untold) > 2.4
    for layers, regret in ((16, 1.692), (32, 1.033)):
        slow = [c for c, run in zip(untold, like, strict=True) if run.cluster.network < 20]
        slow = [c for c in slow if c.run.model.layers == layers]
        picked = min(slow, key=lambda c: c.forecast.step_seconds).run.seconds
        assert picked / min(c.run.seconds for c in slow) - 1 == pytest.approx(regret, abs=0.001)


def _nominal(run):
    return run._replace(cluster=replace(run.cluster, network=400))


def _factor(compared):
    """Return the mean factor between seconds and their forecasts, whichever are more."""
    return exp(mean(abs(log(1 + c.seconds_error)) for c in compared))


def test_pipelines_from_before_the_mend_were_late():
    """On 512 GPUs 99% of them took over half a second longer for each micro-batch than forecast on
    the network that was built, and 75% than forecast on that which their job measured. Of the two
    pipelines from after it, of one micro-batch each, neither did."""
    for told, flawed, late in ((False, True, 0.99), (True, True, 0.75), (False, False, 0.0)):
        runs_512 = [run for run in sweep() if run.cluster.gpus == 512 and run.seconds]
        own = [run for run in runs_512 if run.plan.pp > 1 and run.flawed == flawed]
        seconds = [
            (run.seconds - accuracy.compare(run if told else _nominal(run)).forecast.step_seconds)
            / run.plan.microbatches(run.global_batch)
            for run in own
        ]
        assert len(own) == (108 if flawed else 2)
        assert mean(each > 0.5 for each in seconds) == pytest.approx(late, abs=0.01)


def test_the_sweep_agrees_with_itself_in_memory_but_not_in_time():
    """No plan both ran and ran out of memory: the nine that ran and failed are slips, see
    `test_runs_that_ended_otherwise_are_known_or_are_slips`. But a plan that was repeated took 4.7
    times as long; and on 512 GPUs one micro-batch of two sequences took 0.7 s, two of one sequence
    5.3 s: in that job all-reduces reached 178 GB/s, in this one 13 (copied for 512 GPUs only)."""
    repeated = {}
    for run in sweep():
        repeated.setdefault((run.cluster.gpus, run.name), []).append(run)
    repeated = [group for group in repeated.values() if len(group) > 1]
    both = [group for group in repeated if len({run.failed for run in group}) == 2]
    assert len(both) == 9 and all(run.crashed == run.failed for group in both for run in group)
    times = [[run.seconds for run in group if run.seconds] for group in repeated]
    assert max(max(group) / min(group) for group in times if group) > 4.5
    plan = "Llama 8B dp 128 tp 4 pp 1 x {} zero 0"
    on_512 = {run.name: run.seconds for run in sweep() if run.cluster.gpus == 512}
    assert on_512[plan.format(1)] > 8 * on_512[plan.format(2)]


def test_each_efficiency_follows_from_the_run_that_it_names():
    every = *runs(), *sweep(), *independent()
    published = {(run.source, run.name): run for run in every if run.seconds}
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
