"""The judge of schedules: who passes, and what each fault is called."""

import pytest

from naranhi import schedules
from naranhi.schedules import grade, simulate

TIMES = {"forward": 1, "latency": 0, "input_grad": 1, "weight_grad": 1}

# Rank 1 leaves the gradients of its weights for the end.
MORE_ON_RANK_1 = ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"]


def judged(rows, cost=33, held=4, **times):
    return grade(rows, 4, 8, cost=cost, max_activations=held, **times)


def test_a_schedule_passes_on_its_own_cost_and_memory_and_not_on_less():
    schedule = schedules.one_f_one_b(4, 8)
    verdict = judged(schedule)
    assert verdict and str(verdict) == "passes" and verdict.faults == ()
    assert verdict.schedule is schedule
    assert verdict.timeline.rows == simulate(schedule, **TIMES).rows
    assert judged(str(schedule)) == judged([" ".join(map(str, row)) for row in schedule]) == verdict
    late, large = judged(schedule, cost=32), judged(schedule, held=3)
    assert not late and str(late) == "takes 33, where 32 is the budget"
    assert not large and str(large) == "rank 0 holds 4 micro-batches, where 3 is the budget"
    assert len(judged(schedule, 32, 3).faults) == 2


def test_each_rank_is_weighed():
    verdict = judged(schedules.zero_bubble_h2(4, 8), cost=24, held=6)
    assert str(verdict) == "rank 0 holds 7 micro-batches, where 6 is the budget"
    one_late = [*schedules.gpipe(4, 8)[:3], schedules.one_f_one_b(4, 8)[3]]
    assert judged(one_late, cost=99, held=8)
    verdict = grade(MORE_ON_RANK_1, 2, 3, cost=99, max_activations=2)
    assert str(verdict) == "rank 1 holds 3 micro-batches, where 2 is the budget"


def test_a_chunk_takes_its_part_of_the_time():
    schedule = schedules.interleaved(4, 8, 4)
    verdict = judged(schedule, cost=8 * 3 + 9 / 4, held=99)
    assert verdict and verdict.timeline.cost == pytest.approx(26.25)
    assert not judged(schedule, cost=26.2, held=99)
    for unit in 1, 1e6, 1e-11:  # ranks may count in any
        times = {"forward": unit, "input_grad": unit, "weight_grad": unit}
        third = schedules.interleaved(4, 8, 3)
        verdict = judged(third, cost=27 * unit, held=99, **times)
        assert verdict, str(verdict)
        assert not judged(third, cost=26.9 * unit, held=99, **times)


def test_messages_are_counted_where_they_are_limited():
    schedule = schedules.interleaved(4, 8, 2)
    assert grade(schedule, 4, 8, cost=99, max_activations=99) and grade(
        schedule, 4, 8, cost=99, max_activations=99, messages=112
    )
    verdict = grade(schedule, 4, 8, cost=99, max_activations=99, messages=111)
    assert str(verdict) == "sends 112 messages, where 111 is the budget"


@pytest.mark.parametrize(
    "rows, fault",
    [
        ("0F0 0B0 hello", "rank 0: 'hello' is not an action"),
        (str(schedules.one_f_one_b(2, 8)), "ranks: 2, but 4 are required"),
        (str(schedules.one_f_one_b(4, 1)), "micro-batches: 1, but 8 are required"),
        (str(schedules.gpipe(3, 4)), "ranks: 3, but 4 are required; micro-batches: 4, but 8"),
        (str(schedules.gpipe(4, 8)).replace(" 2B3", ""), "rank 2 forgets 2B3"),
        ([*schedules.inter_layer(4, 8)[:1], *schedules.gpipe(4, 8)[1:]], "deadlock: rank 0 waits"),
    ],
)
def test_what_is_wrong_is_said(rows, fault):
    verdict = judged(rows)
    assert not verdict and fault in str(verdict)
    assert verdict.timeline is None


def test_times_without_sense_are_no_verdict():
    with pytest.raises(ValueError, match="latency must be a time"):
        grade(schedules.gpipe(4, 8), 4, 8, cost=33, max_activations=8, latency=-1)
