"""V-shaped schedules and pairs: diagrams, the papers' tables, and pairs that are not right."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naranhi import schedules
from naranhi.schedules import Action, Overlap, Schedule, ScheduleError, Span, simulate

V = {"zero_bubble_v": schedules.zero_bubble_v, "dualpipe_v": schedules.dualpipe_v}
stages = st.integers(1, 6)
times = st.integers(1, 9)  # whole numbers: every sum is exact


def idle(schedule, f, i, w, overlapped=None):
    """By rank, how long it waits within the longest span of a rank; times are a chunk's."""
    line = simulate(schedule, f, i + w, input_grad=i, weight_grad=w, overlapped=overlapped)
    return [line.cost - busy for busy in line.busy]


# --- diagrams ------------------------------------------------------------------------------------


def test_zero_bubble_v_by_hand():
    assert schedules.zero_bubble_v(2, 3) == Schedule("""
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """)


def test_dualpipe_v_by_hand():
    rows = """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    pairs = re.sub(r"(\w+)&(\w+)", r"(\1;\2)OVERLAP_F_B", rows)
    assert schedules.dualpipe_v(2, 4) == Schedule(pairs)


@pytest.mark.parametrize("make", V.values(), ids=V)
def test_a_v_goes_down_the_ranks_and_back_up(make):
    for p in range(1, 6):
        schedule = make(p, 2 * p + 1)
        assert schedule.placement == (*range(p), *reversed(range(p)))
        messages = schedules.channels(schedule)
        assert all(abs(here - there) == 1 for here, there, _ in messages)
        assert sum(map(len, messages.values())) == 4 * (2 * p + 1) * (p - 1)


def test_too_few_micro_batches_are_refused():
    with pytest.raises(ValueError, match="two micro-batches for each rank: 6 for 3 ranks, not 5"):
        schedules.dualpipe_v(3, 5)


# --- what the papers say -------------------------------------------------------------------------


@given(st.data(), stages, times)
def test_zero_bubble_v_has_no_bubble_in_the_memory_of_1f1b(data, p, t):
    """Qi et al. 2024, section 6: with F = I = W, a bubble of 0, 1F1B's memory, messages twice."""
    m = data.draw(st.integers(2 * p - 1, 5 * p))
    schedule, plain = schedules.zero_bubble_v(p, m), schedules.one_f_one_b(p, m)
    assert max(idle(schedule, t, t, t)) == 0
    peaks = simulate(schedule).peak_activations
    assert peaks == (max(simulate(plain).peak_activations),) * p == (p,) * p
    sent = [sum(map(len, schedules.channels(one).values())) for one in (schedule, plain)]
    assert sent[0] == 2 * sent[1]


@given(st.data(), stages, times, times)
def test_zero_bubble_v_with_short_weight_gradients(data, p, f, w):
    m, w = data.draw(st.integers(2 * p - 1, 5 * p)), min(f, w)
    assert max(idle(schedules.zero_bubble_v(p, m), f, f, w)) == 2 * (p - 1) * (f - w)


@given(stages, st.integers(1, 14))
def test_zero_bubble_v_holds_no_more_than_there_is(p, m):
    peaks = simulate(schedules.zero_bubble_v(p, m)).peak_activations
    assert all(peak <= min(p, m) for peak in peaks)


@given(st.data(), stages, times, times, times)
def test_dualpipe_v_has_the_published_bubble(data, p, f, i, w):
    """(PP/2 - 1)(F&B + B - 3W) with F = I >= W, and PP + 1 chunks held, for PP = 2p stages."""
    m, i = data.draw(st.integers(2 * p, 5 * p)), min(f, i)
    pair = Fraction(data.draw(st.integers(2 * max(f, i + w), 2 * (f + i + w))), 2)
    schedule, pp = schedules.dualpipe_v(p, m), 2 * p
    waits = idle(schedule, f, i, w, pair)
    assert max(waits) == waits[-1] == (p - 1) * (pair + f - w - min(i, w))
    if f == i >= w:
        assert waits[-1] == (Fraction(pp, 2) - 1) * (pair + (i + w) - 3 * w)
    assert simulate(schedule).peak_activations == (Fraction(pp + 1, 2),) * p


def test_pairs_that_take_no_less_time_cost_bubble():
    """Waiting for the messages of both, where one could begin, is what a pair costs."""
    schedule = schedules.dualpipe_v(4, 8)
    apart, together, halved = (idle(schedule, 1, 1, 1, pair)[-1] for pair in (None, 3, 2))
    assert (apart, together, halved) == (3, 6, 3)


# --- pairs ---------------------------------------------------------------------------------------

PAIR = "(0F4;7B0)OVERLAP_F_B"


def test_a_pair_is_named_as_torch_names_it():
    pair = Overlap(Action(0, "F", 4), Action(7, "B", 0))
    assert str(pair) == repr(pair) == PAIR
    assert Overlap.parse(PAIR) == pair
    rows = Schedule([["0F0", pair, PAIR, Action(7, "B", 1)]])
    assert rows == Schedule(f"0F0 {PAIR} {PAIR} 7B1") != Schedule("0F0 0F4 7B0 0F4 7B0 7B1")
    assert str(rows) == f"0F0 {PAIR} {PAIR} 7B1"
    assert str(rows[0]) == "(0F0, 0F4, 7B0, 0F4, 7B0, 7B1)"
    assert rows.units[0] == (rows[0][:1], rows[0][1:3], rows[0][3:5], rows[0][5:])


@pytest.mark.parametrize("make", V.values(), ids=V)
def test_the_text_of_a_schedule_is_the_schedule(make):
    assert Schedule(str(make(3, 7))) == make(3, 7)


@pytest.mark.parametrize(
    "name", ["(0B0;1F0)OVERLAP_F_B", "(0F0;1F0)OVERLAP_F_B", "(0F0)OVERLAP_F_B", "(0F0;1B0)", "()"]
)
def test_what_is_no_pair_is_refused(name):
    with pytest.raises(ScheduleError, match=r"rank 1: .* is not a pair: expected a forward, then"):
        Schedule(["0F0", [name]])


def test_a_forward_cannot_overlap_its_own_backward():
    with pytest.raises(ScheduleError, match="rank 0 overlaps 0F0 with 0B0, its own backward"):
        schedules.check(Schedule("(0F0;0B0)OVERLAP_F_B"))


def test_a_pair_waits_for_both_messages():
    """Where one after the other would do, two ranks can wait for each other."""
    apart = Schedule("0F0 0F1 3F0 3F1 3B0 0B0 3B1 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    schedules.check(apart)
    pairs = Schedule(
        str(apart)
        .replace("3F1 3B0", "(3F1;3B0)OVERLAP_F_B")
        .replace("2F1 2B0", "(2F1;2B0)OVERLAP_F_B")
    )
    assert pairs.rows == apart.rows
    words = (
        r"deadlock: rank 0 waits at \(3F1;3B0\)OVERLAP_F_B for 2F1 of rank 1, rank 1 waits at "
        r"\(2F1;2B0\)OVERLAP_F_B for 3B0 of rank 0"
    )
    with pytest.raises(ScheduleError, match=words) as caught:
        schedules.check(pairs)
    assert (caught.value.rank, str(caught.value.action)) == (0, "3F1")


def test_the_two_of_a_pair_run_from_the_same_start_to_the_same_end():
    schedule = schedules.dualpipe_v(2, 4)
    line = simulate(schedule, 2, 4, overlapped=5)
    for rank, row in enumerate(line):
        spans = {span.action: (span.start, span.end) for span in row}
        for unit in schedule.units[rank]:
            if len(unit) == 2:
                start, end = spans[unit[0]]
                assert spans[unit[1]] == (start, end) and end - start == 5
    pairs = [sum(len(unit) == 2 for unit in units) for units in schedule.units]
    assert line.busy == tuple(4 * (4 + 8) - one * (2 + 4 - 5) for one in pairs)
    by_stage = simulate(schedule, 2, 4, overlapped=[5, 4, 4, 6])
    assert by_stage.busy[1] == 4 * (4 + 8) - pairs[1] * (2 + 4 - 4)
    assert simulate(schedule, 2, 4).busy == (48, 48)  # one after the other


@pytest.mark.parametrize(
    "wrong, words", [([1, 2], "overlapped has 2 times for 4 virtual"), (-1, "must be a time")]
)
def test_a_wrong_time_of_pairs_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        simulate(schedules.dualpipe_v(2, 4), overlapped=wrong)


def test_only_the_two_of_a_pair_overlap_in_a_timeline():
    def line(*times):
        return schedules.Timeline([[Span(Action(0, "F", 0), *both) for both in times]])

    assert (line((0, 2), (0, 3), (3, 4)).busy, line((0, 3), (0, 2)).cost) == ((4,), 3)
    assert line((0, 2), (0, 3), (7, 8)).bubble_rate == 0.5
    for wrong in (
        [(0, 2), (1, 3)],
        [(0, 2), (0, 2), (0, 2)],
        [(0, 3), (0, 2), (2, 4)],
        [(0, 3), (0, -1)],
    ):
        with pytest.raises(ValueError, match="but it was busy until"):
            line(*wrong)
