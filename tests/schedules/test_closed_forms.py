"""The package's schedules: their diagrams, and what the papers say of their bubble and memory."""

import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naranhi import schedules
from naranhi.schedules import Schedule, balance, simulate

stages = st.integers(1, 7)
microbatches = st.integers(1, 16)
times = st.integers(1, 9)  # whole numbers: every sum is exact


def waiting(schedule, forward, input_grad, weight_grad, chunks=1):
    """The longest rank's span less its work; the times are a rank's for one micro-batch."""
    forward, input_grad, weight_grad = (
        Fraction(time, chunks) for time in (forward, input_grad, weight_grad)
    )
    timeline = simulate(
        schedule,
        forward,
        input_grad + weight_grad,
        latency=0,
        input_grad=input_grad,
        weight_grad=weight_grad,
    )
    assert len(set(timeline.busy)) == 1
    return timeline.cost - timeline.busy[0]


def end(schedule, forward, input_grad, weight_grad):
    """From the first action of all to the last."""
    timeline = simulate(
        schedule, forward, latency=0, input_grad=input_grad, weight_grad=weight_grad
    )
    return max(row[-1].end for row in timeline)


def peaks(schedule):
    return simulate(schedule).peak_activations


# --- diagrams ------------------------------------------------------------------------------------


def test_one_f_one_b_by_hand():
    assert schedules.one_f_one_b(3, 4) == Schedule("""
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """)


def test_interleaved_by_hand():
    """Two micro-batches through chunk 0 (stages 0 and 1), then through chunk 1 (2 and 3)."""
    assert schedules.interleaved(2, 4, 2) == Schedule("""
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """)


def test_zero_bubble_by_hand():
    assert schedules.zero_bubble_h1(2, 3) == Schedule("""
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """)
    assert schedules.zero_bubble_h2(2, 4) == Schedule("""
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """)


def test_without_a_flush_by_hand():
    assert schedules.pipedream(2, 3) == Schedule("""
        0F0 0F1 0B0 0U1 0F2@1 0B1 0U2 0B2 0U3
        1F0 1B0 1U1 1F1@1 1B1 1U2 1F2@2 1B2 1U3
    """)
    assert schedules.pipedream_2bw(2, 2, 3) == Schedule("""
        0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0F4@1 0B3 0U2 0F5@1 0B4 0B5 0U3
        1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U2 1F4@1 1B4 1F5@1 1B5 1U3
    """)


# --- all of them ---------------------------------------------------------------------------------

ALL = {
    "gpipe": schedules.gpipe,
    "one_f_one_b": schedules.one_f_one_b,
    "interleaved by 2": lambda p, m: schedules.interleaved(p, p * m, 2),
    "interleaved by 4": lambda p, m: schedules.interleaved(p, p * m, 4),
    "zero_bubble_h1": schedules.zero_bubble_h1,
    "zero_bubble_h2": schedules.zero_bubble_h2,
    "zero_bubble_v": schedules.zero_bubble_v,
    "dualpipe_v": lambda p, m: schedules.dualpipe_v(p, 2 * p + m - 1),
    "pipedream": schedules.pipedream,
    "pipedream_2bw": lambda p, m: schedules.pipedream_2bw(p, m, 3),
}


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_every_size_is_right(make):
    """Down to one stage and one micro-batch, and fewer micro-batches than stages."""
    for p in range(1, 7):
        for m in range(1, 12):
            schedules.check(make(p, m))


@pytest.mark.parametrize(
    "generator, numbers",
    [
        (schedules.one_f_one_b, ("stages", "microbatches")),
        (schedules.zero_bubble_h1, ("stages", "microbatches")),
        (schedules.zero_bubble_h2, ("stages", "microbatches")),
        (schedules.zero_bubble_v, ("stages", "microbatches")),
        (schedules.dualpipe_v, ("stages", "microbatches")),
        (schedules.pipedream, ("stages", "microbatches")),
        (schedules.interleaved, ("stages", "microbatches", "chunks")),
        (schedules.pipedream_2bw, ("stages", "microbatches", "updates")),
    ],
)
def test_a_number_that_makes_no_schedule_is_named(generator, numbers):
    for name in numbers:
        for wrong in (0, -1, 1.0, "2"):
            arguments = {**dict.fromkeys(numbers, 4), name: wrong}
            with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
                generator(**arguments)


@pytest.mark.parametrize("number", [np.int64, np.int8])
def test_numbers_of_numpy_are_numbers(number):
    schedule = schedules.interleaved(4, 8, 2)
    assert schedules.interleaved(*map(number, (4, 8, 2))) == schedule
    assert simulate(schedule, np.arange(1, 9)) == simulate(schedule, [*range(1, 9)])
    assert simulate(schedule, np.array(2)) == simulate(schedule, number(2)) == simulate(schedule, 2)
    schedules.check_versions(schedule, number(1))
    assert balance.uniform([None] * 5, number(2)) == [3, 2]
    sharded = schedules.with_sharding(schedule, 3, keep=number(1))
    assert sharded == schedules.with_sharding(schedule, 3, keep=1)


def test_what_interleaving_cannot_divide_is_refused():
    with pytest.raises(ValueError, match="rounds of one per rank: 6 is no multiple of 4"):
        schedules.interleaved(4, 6, 2)
    with pytest.raises(ValueError, match="2 is no multiple of 4"):
        schedules.interleaved(4, 2, 2)


# --- 1F1B ----------------------------------------------------------------------------------------


@given(stages, microbatches, times, times, times)
def test_one_f_one_b(p, m, f, i, w):
    """GPipe's bubble, and min(p - stage, m) micro-batches held."""
    schedule = schedules.one_f_one_b(p, m)
    assert waiting(schedule, f, i, w) == (p - 1) * (f + i + w)
    assert waiting(schedules.gpipe(p, m), f, i, w) == (p - 1) * (f + i + w)
    assert peaks(schedule) == tuple(min(p - stage, m) for stage in range(p))
    messages = schedules.channels(schedule).values()
    assert sum(map(len, messages)) == 2 * m * (p - 1)


# --- interleaved ---------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), times, times, times)
def test_interleaved(p, rounds, v, f, i, w):
    """The bubble through v, for v times the messages (and those between the rounds)."""
    m = p * rounds
    schedule = schedules.interleaved(p, m, v)
    assert schedule.placement == tuple(stage % p for stage in range(p * v))
    assert waiting(schedule, f, i, w, chunks=v) == Fraction((p - 1) * (f + i + w), v)
    messages = schedules.channels(schedule).values()
    assert sum(map(len, messages)) == (2 * m * (p * v - 1) if p > 1 else 0)
    ahead = [(v - 1) * p + 2 * (p - 1 - rank) + 1 for rank in range(p)]
    assert [peak * v for peak in peaks(schedule)] == pytest.approx([min(a, m * v) for a in ahead])
    for a, rank in zip(ahead, range(p), strict=True):  # as the docstring has it
        assert Fraction(a, v) == p + Fraction(p - 1 - 2 * rank, v)


def test_why_interleaving_starts_that_far_ahead():
    """p - 1 - rank forwards fewer wait no longer without latency, and much longer with it."""

    def shorter(p, m, v):
        rows = []
        for rank, row in enumerate(schedules.interleaved(p, m, v)):
            forwards = [action for action in row if action.kind == "F"]
            backwards = [action for action in row if action.kind == "B"]
            ahead = (v - 1) * p + p - rank
            turns = zip(backwards, [*forwards[ahead:], *[None] * ahead], strict=True)
            rows.append(forwards[:ahead] + [a for pair in turns for a in pair if a])
        return Schedule(rows)

    ours, fewer = schedules.interleaved(4, 16, 2), shorter(4, 16, 2)
    assert waiting(ours, 2, 2, 2, chunks=2) == waiting(fewer, 2, 2, 2, chunks=2) == 9
    assert peaks(ours) == (5.5, 4.5, 3.5, 2.5) and peaks(fewer) == (4.0, 3.5, 3.0, 2.5)
    late, later = (simulate(s, 1, 2, latency=Fraction(1, 10)).cost for s in (ours, fewer))
    assert late - 96 < 11 and later - 96 > 14


# --- zero bubble ---------------------------------------------------------------------------------


@given(st.data(), stages, times, times, times)
def test_zero_bubble_h1(data, p, f, i, w):
    m = data.draw(st.integers(p, 3 * p))
    schedule = schedules.zero_bubble_h1(p, m)
    found = waiting(schedule, f, i, w)
    assert found == (p - 1) * max(f + i - w, i)
    if w <= f:
        assert found == (p - 1) * (f + i - w)
    assert peaks(schedule) == (p,) * p


@given(st.data(), stages, times, times, times)
def test_zero_bubble_h2(data, p, f, i, w):
    m = data.draw(st.integers(2 * p - 1, 5 * p))
    schedule = schedules.zero_bubble_h2(p, m)
    found = waiting(schedule, f, i, w)
    assert found == (p - 1) * max(f + i - 2 * w, i - f, 0)
    if w <= f and 2 * w <= f + i:
        assert found == (p - 1) * (f + i - 2 * w)
    assert peaks(schedule) == (2 * p - 1,) * p


@given(stages, microbatches, times)
def test_zero_bubble_with_equal_times(p, m, t):
    """H1 leaves a third of 1F1B's bubble, and H2 none, with enough micro-batches."""
    whole = waiting(schedules.one_f_one_b(p, m), t, t, t)
    if m >= p:
        assert waiting(schedules.zero_bubble_h1(p, m), t, t, t) == Fraction(whole, 3)
    if m >= 2 * p - 1:
        assert waiting(schedules.zero_bubble_h2(p, m), t, t, t) == 0


@given(stages, microbatches)
def test_zero_bubble_holds_no_more_than_there_is(p, m):
    assert peaks(schedules.zero_bubble_h1(p, m)) == (min(p, m),) * p
    assert peaks(schedules.zero_bubble_h2(p, m)) == (min(2 * p - 1, m),) * p


@given(stages, microbatches)
def test_zero_bubble_h1_is_one_f_one_b_but_for_the_weights(p, m):
    rows = [
        [
            action._replace(kind={"I": "B"}.get(action.kind, "F"))
            for action in row
            if action.kind != "W"
        ]
        for row in schedules.zero_bubble_h1(p, m)
    ]
    assert Schedule(rows) == schedules.one_f_one_b(p, m)


@given(st.data(), stages, times, times, times)
def test_one_flushed_step_of_h2_beside_one_of_h1(data, p, f, i, w):
    """With I no longer than W and F, H2 ends no sooner than H1; with a longer I it does."""
    m = data.draw(st.integers(2 * p - 1, 5 * p))
    work = m * (f + i + w)
    h1 = end(schedules.zero_bubble_h1(p, m), f, i, w)
    h2 = end(schedules.zero_bubble_h2(p, m), f, i, w)
    assert h1 == work + (p - 1) * max(f, f + i - w, i)
    assert h2 == work + (p - 1) * max(f, f + i - 2 * w, i - f)
    if i <= min(w, f):
        assert h1 == h2
    elif p > 1:
        assert h2 < h1


# --- cost ----------------------------------------------------------------------------------------

LARGE = {
    "gpipe": schedules.gpipe,
    "one_f_one_b": schedules.one_f_one_b,
    "interleaved": lambda p, m: schedules.interleaved(p, m, 2),
    "zero_bubble_h2": schedules.zero_bubble_h2,
    "pipedream_2bw": lambda p, m: schedules.pipedream_2bw(p, m // 4, 4),
}


def lines(make, p, m):
    """Lines of Python that run to build, check, simulate and count versions: unlike seconds, always
    as many."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        schedule = make(p, m)
        schedules.check(schedule)
        simulate(schedule)
        schedules.peak_versions(schedule)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("p, m", [(8, 256), (32, 64)])
def test_work_grows_with_the_number_of_actions(make, p, m):
    """Four times the actions: about four times the work, where a square would be 16 times."""
    few, many = lines(make, 8, 64), lines(make, p, m)
    assert 3 * few < many < 6 * few


def test_64_stages_and_1024_microbatches():
    schedule = schedules.zero_bubble_h1(64, 1024)
    timeline = simulate(schedule, 1, latency=0, input_grad=1, weight_grad=1)
    assert timeline.cost == 3 * 1024 + 63
    assert timeline.peak_activations == (64,) * 64
