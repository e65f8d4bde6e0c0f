"""The seconds of a pipeline are those of the simulated schedule, with uneven stages."""

import random

import pytest

from naranhi import schedules
from naranhi.planning import pipeline
from naranhi.planning.memory import in_flight
from naranhi.planning.pipeline import one_f_one_b_seconds, pipeline_seconds


def uneven(order, stages):
    """Times of stages, some equal and some not, as a head or an embedding makes them."""
    forward = tuple(order.choice([1.0, 1.0, 0.5 + order.random()]) for _ in range(stages))
    backward = tuple(order.choice([2.0, 2.0, 1 + 2 * order.random()]) for _ in range(stages))
    return forward, backward


def simulated(name, stages, microbatches, forward, backward, latency, chunks=1):
    more = (chunks,) if name == "interleaved" else ()
    schedule = schedules.get(name)(stages, microbatches, *more)
    timeline = schedules.simulate(schedule, list(forward), list(backward), latency=latency)
    if name.startswith("zero_bubble"):
        return timeline.cost
    return max(spans[-1].end for spans in timeline.rows)


@pytest.mark.parametrize("seed", range(60))
def test_1f1b_takes_what_the_simulation_says(seed):
    order = random.Random(seed)
    stages, microbatches = order.randint(2, 8), order.randint(1, 60)
    forward, backward = uneven(order, stages)
    latency = order.choice([0.0, 0.1, 1.0])
    seconds = one_f_one_b_seconds(microbatches, forward, backward, latency)
    expected = simulated("one_f_one_b", stages, microbatches, forward, backward, latency)
    assert seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "inter_layer", "zero_bubble_h1", "zero_bubble_h2"])
@pytest.mark.parametrize("seed", range(4))
def test_other_schedules_take_what_the_simulation_says(name, seed):
    order = random.Random(seed)
    stages, microbatches = order.randint(2, 6), order.randint(1, 30)
    forward, backward = uneven(order, stages)
    latency = order.choice([0.0, 0.3])
    seconds = pipeline_seconds(name, microbatches, forward, backward, latency)
    expected = simulated(name, stages, microbatches, forward, backward, latency)
    assert seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_interleaved_schedule_takes_what_the_simulation_says(seed):
    order = random.Random(seed)
    stages, chunks = order.randint(2, 4), order.randint(1, 3)
    microbatches = stages * order.randint(1, 6)
    forward, backward = uneven(order, stages * chunks)
    times = forward, backward, 0.1, chunks
    seconds = pipeline_seconds("interleaved", microbatches, *times)
    expected = simulated("interleaved", stages, microbatches, *times)
    assert seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["zero_bubble_v", "dualpipe_v"])
@pytest.mark.parametrize("seed", range(4))
def test_v_shaped_schedules_take_what_the_simulation_says(name, seed):
    order = random.Random(seed)
    stages = order.randint(2, 4)
    microbatches = 2 * stages + order.randint(0, 12)
    times = *uneven(order, 2 * stages), order.choice([0.0, 0.3])
    seconds = pipeline_seconds(name, microbatches, *times, 2)
    expected = simulated(name, stages, microbatches, *times)
    assert seconds == pytest.approx(expected, rel=1e-12)


def test_few_rounds_and_their_pace_stand_for_many(monkeypatch):
    """All stages equal but the last, which has the output layer: the usual case."""
    monkeypatch.setattr(pipeline, "ACTIONS", 0)
    for chunks in (1, 2, 3):
        forward = (1.0,) * (4 * chunks - 1) + (1.7,)
        backward = (2.0,) * (4 * chunks - 1) + (3.4,)
        times = forward, backward, 0.05, chunks
        seconds = pipeline_seconds("interleaved", 64, *times)
        assert seconds == pytest.approx(simulated("interleaved", 4, 64, *times), rel=1e-9)


def test_the_quick_estimate_is_the_bubble_of_equal_stages():
    for name, chunks in (("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2)):
        times = (1.0,) * 4 * chunks, (2.0,) * 4 * chunks, 0.0, chunks
        quick = pipeline_seconds(name, 16, *times, exact=False)
        assert quick == pytest.approx(pipeline_seconds(name, 16, *times))


@pytest.mark.parametrize(
    "name, chunks",
    [
        ("one_f_one_b", 1),
        ("gpipe", 1),
        ("inter_layer", 1),
        ("zero_bubble_h1", 1),
        ("zero_bubble_h2", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zero_bubble_v", 2),
        ("dualpipe_v", 2),
    ],
)
@pytest.mark.parametrize("microbatches", [4, 8, 24])
def test_micro_batches_in_flight_are_those_of_the_schedule(name, chunks, microbatches):
    more = (chunks,) if name == "interleaved" else ()
    if name == "dualpipe_v":
        microbatches = max(8, microbatches)
    timeline = schedules.simulate(schedules.get(name)(4, microbatches, *more))
    expected = [in_flight(name, 4, stage, microbatches, chunks) for stage in range(4)]
    assert list(timeline.peak_activations) == pytest.approx(expected)
