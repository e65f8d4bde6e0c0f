"""The simulator: closed forms exactly, and any schedule against another way of computing it."""

from fractions import Fraction
from itertools import pairwise

import own_schedules
import pytest
from drawn_schedules import microbatches, right_schedules, stages
from hypothesis import given
from hypothesis import strategies as st

from naranhi import schedules
from naranhi.schedules import Action, Schedule, ScheduleError, Span, Timeline, simulate

fractions = st.fractions(Fraction(1, 8), 8, max_denominator=8)


# --- closed forms --------------------------------------------------------------------------------


@given(stages, microbatches, fractions, fractions)
def test_gpipe(p, m, forward, backward):
    """(m + p - 1)(F + B), of which (p - 1) / (m + p - 1) is bubble; m micro-batches held."""
    timeline = simulate(schedules.gpipe(p, m), forward, backward, latency=0)
    assert timeline.cost == (m + p - 1) * (forward + backward)
    assert timeline.bubble_rate == Fraction(p - 1, m + p - 1)
    assert timeline.peak_activations == (m,) * p


@given(stages, microbatches, fractions, fractions)
def test_inter_layer(p, m, forward, backward):
    """One of p ranks works at a time."""
    timeline = simulate(schedules.inter_layer(p, m), forward, backward, latency=0)
    assert timeline.cost == m * p * (forward + backward)
    assert 1 - timeline.bubble_rate == Fraction(1, p)
    assert timeline.peak_activations == (1,) * p
    spans = sorted((start, end) for row in timeline for _, start, end in row)
    assert all(end == start for (_, end), (start, _) in pairwise(spans))


@given(st.data(), stages, microbatches)
def test_gpipe_with_unequal_stages(data, p, m):
    """The slowest stage sets the pace of all micro-batches but the first."""
    per_stage = st.lists(fractions, min_size=p, max_size=p)
    forward, backward = data.draw(per_stage), data.draw(per_stage)
    timeline = simulate(schedules.gpipe(p, m), forward, backward, latency=0)
    once, again = sum(forward) + sum(backward), max(forward) + max(backward)
    assert timeline[0][-1].end == once + (m - 1) * again
    assert timeline.busy == tuple(m * (f + b) for f, b in zip(forward, backward, strict=True))


@given(stages, microbatches, fractions, fractions, fractions)
def test_latency(p, m, forward, backward, latency):
    """GPipe pays each of its 2(p - 1) hops once, inter-layer once for every micro-batch."""
    work = forward + backward
    timeline = simulate(schedules.gpipe(p, m), forward, backward, latency=latency)
    assert timeline.cost == (m + p - 1) * work + 2 * (p - 1) * latency
    timeline = simulate(schedules.inter_layer(p, m), forward, backward, latency=latency)
    assert timeline.cost == m * (p * work + 2 * (p - 1) * latency)


@given(st.integers(2, 5), microbatches, fractions, fractions, fractions)
def test_a_split_backward(p, m, forward, input_grad, weight_grad):
    """Gradients of weights hold nobody up: all wait only for forwards and for inputs' gradients."""
    schedule = own_schedules.late_weights(p, m)
    timeline = simulate(
        schedule, forward, latency=0, input_grad=input_grad, weight_grad=weight_grad
    )
    last_input = (m + p - 1) * (forward + input_grad)
    assert timeline[0][-1] == (Action(0, "W", m - 1), *_after(last_input, m, weight_grad))
    assert timeline.peak_activations == (m,) * p


def _after(start, m, time):
    return start + (m - 1) * time, start + m * time


# --- by hand -------------------------------------------------------------------------------------


def test_every_time_of_a_small_pipeline():
    timeline = simulate(schedules.one_f_one_b(2, 2), latency=0.5)
    assert [[(str(action), start, end) for action, start, end in row] for row in timeline] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 7), ("0B1", 8, 10)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]
    assert timeline.cost == 10
    assert timeline.busy == (6, 6)
    assert timeline.bubble_rate == pytest.approx(1 - 12 / 20)
    assert repr(timeline) == "<Timeline of 2 ranks: cost=10, bubble_rate=0.4>"


def test_halves_of_a_backward_and_updates():
    schedule = Schedule("0F0 0I0 0W0 0U1")
    ends = [span.end for span in simulate(schedule)[0]]
    assert ends == [1, 2, 3, 3]
    ends = [span.end for span in simulate(schedule, 1, backward=[3], update=[10])[0]]
    assert ends == [1, 2.5, 4, 14]
    ends = [span.end for span in simulate(schedule, input_grad=5, weight_grad=[7])[0]]
    assert ends == [1, 6, 13, 13]


def test_a_chunk_counts_its_share():
    timeline = simulate(own_schedules.looped(2, 3, 4))
    assert timeline.peak_activations == (3, 3)  # 3 micro-batches in each of 4 chunks of a quarter
    one = simulate(Schedule("0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1"))
    assert one.peak_activations == (1.5,)


def test_activations_are_held_until_the_gradient_of_the_weights():
    assert simulate(Schedule("0F0 0I0 0F1 0I1 0W0 0W1")).peak_activations == (2,)
    assert simulate(Schedule("0F0 0I0 0W0 0F1 0I1 0W1")).peak_activations == (1,)


def test_hand_over_within_a_rank_takes_no_time():
    assert simulate(own_schedules.there_and_back(1, 1), latency=100).cost == 6
    # 0 -> 1 -> (1) -> 0 and back: four hops.
    assert simulate(own_schedules.there_and_back(2, 1), latency=100).cost == 12 + 4 * 100


def test_without_a_flush_the_bubble_is_paid_once():
    """PipeDream's order: between the first micro-batches and the last, the ranks never wait."""
    timeline = simulate(schedules.pipedream(4, 40), 1, 1)
    assert timeline.cost == 2 * (40 + 3)
    waits = [b.start - a.end for a, b in pairwise(timeline[0][10:-10])]
    assert not any(waits)


# --- any schedule --------------------------------------------------------------------------------


@given(st.data(), right_schedules(), fractions)
def test_every_action_starts_as_early_as_it_can(data, schedule, latency):
    """Against times that are raised until nothing is too early any more."""
    per_stage = st.lists(
        fractions, min_size=schedule.virtual_stages, max_size=schedule.virtual_stages
    )
    forward, whole, halves = data.draw(per_stage), data.draw(per_stage), data.draw(per_stage)
    update = data.draw(fractions)
    timeline = simulate(
        schedule,
        forward,
        whole,
        latency=latency,
        input_grad=halves,
        weight_grad=halves,
        update=update,
    )
    times = {"F": forward, "B": whole, "I": halves, "W": halves, "U": [update] * 99}
    rank_of = {action.stage: rank for rank, row in enumerate(schedule) for action in row}
    start = {action: 0 for row in schedule for action in row}

    def end(action):
        return start[action] + times[action.kind][action.stage]

    def from_other_stage(action):
        way = {"F": -1, "B": 1, "I": 1}.get(action.kind)
        for kind in ("F",) if way == -1 else ("B", "I"):
            for version in range(99) if kind == "F" else (0,):
                other = Action(action.stage + (way or 0), kind, action.microbatch, version)
                if way and other in start:
                    travels = rank_of[other.stage] != rank_of[action.stage]
                    return end(other) + (latency if travels else 0)
        return 0

    changed = True
    while changed:
        changed = False
        for row in schedule:
            free = 0
            for action in row:
                earliest = max(free, from_other_stage(action))
                changed |= earliest > start[action]
                start[action] = earliest
                free = end(action)
    assert [list(row) for row in timeline] == [
        [Span(action, start[action], end(action)) for action in row] for row in schedule
    ]
    assert timeline.busy == tuple(
        sum(times[action.kind][action.stage] for action in row) for row in schedule
    )
    assert 0 <= timeline.bubble_rate < 1


# --- what makes no sense -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times, message",
    [
        ({"forward": [1.0]}, "forward has 1 times for 2 virtual stages"),
        ({"backward": (1.0, 2.0, 3.0)}, "backward has 3 times for 2 virtual stages"),
        ({"forward": [1.0, -1.0]}, "forward must be a time, finite and at least 0, not -1.0"),
        ({"forward": float("nan")}, "forward must be a time, finite and at least 0, not nan"),
        ({"latency": float("inf")}, "latency must be a time, finite and at least 0, not inf"),
        ({"update": -1}, "update must be a time, finite and at least 0, not -1"),
        ({"input_grad": 1.0}, "give both input_grad and weight_grad, or neither"),
        ({"input_grad": 1.0, "weight_grad": [1.0]}, "weight_grad has 1 times for 2"),
    ],
)
def test_times_that_make_no_sense_are_named(times, message):
    with pytest.raises(ValueError, match=message):
        simulate(schedules.gpipe(2, 2), **times)


def test_what_check_refuses_is_not_simulated():
    with pytest.raises(ScheduleError, match="rank 1 forgets 1B0"):
        simulate(Schedule("0F0 0B0\n1F0"))


def test_a_timeline_that_cannot_have_been_is_refused():
    action = Action(0, "F", 0)
    with pytest.raises(ValueError, match="rank 1 did nothing"):
        Timeline([[Span(action, 0.0, 1.0)], []])
    transfer = Action(0, "UNSHARD", None)
    with pytest.raises(ValueError, match=r"rank 0: 0UNSHARD starts at 1.0, but ends at 0.5"):
        Timeline([[Span(transfer, 1.0, 0.5)]])
    assert Timeline([[Span(transfer, 0.0, 1.0)], [Span(action, 0.0, 2.0)]]).cost == 2.0
    with pytest.raises(ValueError, match=r"rank 0: 0F0 from 0.5 to 2.0, but it was busy until 1.0"):
        Timeline([[Span(action, 0.0, 1.0), Span(action, 0.5, 2.0)]])
    with pytest.raises(ValueError, match=r"rank 0: 0F0 from 2.0 to 1.0"):
        Timeline([[Span(action, 2.0, 1.0)]])


def test_a_measured_timeline_starts_whenever_it_likes():
    rows = simulate(schedules.gpipe(2, 3)).rows
    later = Timeline([[Span(a, s + 1e6, e + 1e6) for a, s, e in row] for row in rows])
    assert later.cost == Timeline(rows).cost == 12
    assert later.bubble_rate == Timeline(rows).bubble_rate
    assert later.peak_activations == Timeline(rows).peak_activations


def test_no_time_at_all_is_no_bubble():
    assert simulate(schedules.gpipe(2, 2), 0, 0).bubble_rate == 0


def test_what_is_exact_stays_exact():
    third = Fraction(1, 3)
    timeline = simulate(schedules.pipedream(2, 4), third, 2 * third)
    assert {type(one) for one in (timeline.cost, *timeline.busy)} == {Fraction}
    assert all(type(span.end) is Fraction for row in timeline.rows for span in row)


# --- links with a bandwidth ----------------------------------------------------------------------


@given(microbatches, st.fractions(1, 8, max_denominator=8))
def test_a_slow_link_carries_one_message_after_another(m, each):
    """GPipe on two stages whose messages take longer than their actions: the link sets the pace."""
    timeline = simulate(schedules.gpipe(2, m), 1, 1, bandwidth=1 / each)
    assert [span.start for span in timeline[1][:m]] == [1 + each * (k + 1) for k in range(m)]
    gradients = 1 + each * m + 1 + 1  # when rank 1's first backward ends
    assert timeline[0][-1].end == gradients + each * m + 1


@given(right_schedules(), fractions)
def test_a_link_without_a_limit_is_as_none(schedule, latency):
    free = simulate(schedule, latency=latency)
    assert simulate(schedule, latency=latency, bandwidth=float("inf")).rows == free.rows


def test_activations_and_gradients_share_a_link():
    """In a V rank 0 sends rank 1 both: 2m messages, each of which takes 100."""
    timeline = simulate(schedules.zero_bubble_v(2, 4), bandwidth=Fraction(1, 100))
    assert timeline[1][-1].end > 800
    assert max(span.start for span in timeline[1] if span.action.kind in "FI") >= 800


@pytest.mark.parametrize("bandwidth", [0, -1.0, float("nan")])
def test_a_bandwidth_that_is_none_is_refused(bandwidth):
    with pytest.raises(ValueError, match=f"bandwidth must be positive, or None, not {bandwidth!r}"):
        simulate(schedules.gpipe(2, 2), bandwidth=bandwidth)
