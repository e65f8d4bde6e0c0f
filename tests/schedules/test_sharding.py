"""The actions of ZeRO in a schedule: where they go, what is refused, what they cost."""

from collections import Counter
from fractions import Fraction

import pytest
import torch.distributed.pipelining.schedules as torchs
from drawn_schedules import right_schedules
from hypothesis import given
from hypothesis import strategies as st

from naranhi import costs, schedules
from naranhi.schedules import (
    Action,
    Schedule,
    ScheduleError,
    check,
    gathered,
    simulate,
    transfers,
    with_sharding,
)
from naranhi.schedules.schedule import SHARDING

ways = st.builds(
    dict, stage=st.just(3), keep=st.none() | st.integers(0, 4), reduce_each=st.booleans()
)
ways |= st.builds(dict, stage=st.just(2), reduce_each=st.booleans())


def without(schedule):
    """The same schedule without actions of ZeRO."""
    return Schedule(
        [schedules.schedule.name_of(unit) for unit in row if unit[0].kind not in SHARDING]
        for row in schedule.units
    )


def test_names_are_torchs():
    for kind in SHARDING:
        action = Action(12, kind, None)
        assert str(action) == f"12{kind}" == str(torchs._Action.from_str(str(action)))
        assert Action.parse(str(action)) == action
    for name in ("UNSHARD", "2UNSHARD0", "2UNSHARD@1", "2unshard"):
        with pytest.raises(ScheduleError, match="is not an action"):
            Action.parse(name)


@given(right_schedules(updates=False), ways)
def test_actions_are_added_to_any_schedule_with_a_flush(schedule, way):
    sharded = with_sharding(schedule, **way)
    check(sharded)
    assert without(sharded) == schedule
    assert Schedule(str(sharded)) == sharded
    m, keep = schedule.microbatches, way.get("keep")
    for stage, (gathers, reductions) in enumerate(transfers(sharded)):
        row = schedule.units[schedule.placement[stage]]
        units = sum(any(action.stage == stage for action in unit) for unit in row)
        assert reductions == (m if way["reduce_each"] else 1)
        assert gathers == (0 if way["stage"] == 2 else 1 if keep is None else gathers)
        assert way["stage"] == 2 or keep != 0 or gathers == units
    chunks = [len({action.stage for action in row}) for row in schedule]
    pair = max(len({a.stage for a in unit}) for row in schedule.units for unit in row)
    for rank, whole in enumerate(gathered(sharded)):
        most = chunks[rank] if keep is None else min(max(keep, pair), chunks[rank])
        assert max(map(len, whole)) <= most
        assert keep is not None or max(map(len, whole)) == chunks[rank]


@given(right_schedules(updates=False), st.integers(1, 3))
def test_they_come_where_torch_puts_them(schedule, keep):
    """Up to two chunks on a rank: of more, torch counts those of a pair otherwise."""
    ours = with_sharding(schedule, 3, keep=keep)
    for units, row in zip(schedule.units, ours.units, strict=True):
        if len({action.stage for unit in units for action in unit}) > 2:
            continue
        actions = [torchs._Action.from_str(schedules.schedule.name_of(unit)) for unit in units]
        theirs = torchs._add_unshard_reshard(actions, keep)
        theirs = torchs._add_reduce_grad(theirs, schedule.microbatches)
        assert [schedules.schedule.name_of(unit) for unit in row] == list(map(str, theirs))


def test_a_stage_that_stays_is_gathered_once_and_one_that_does_not_twice_a_micro_batch():
    m = 8
    for make in schedules.gpipe, schedules.one_f_one_b:
        for keep in (None, 1, 5):
            assert transfers(with_sharding(make(4, m), 3, keep=keep)) == ((1, 1),) * 4
        assert transfers(with_sharding(make(4, m), 3, keep=0)) == ((2 * m, 1),) * 4
    split = with_sharding(schedules.zero_bubble_h1(4, m), 3, keep=0)
    assert transfers(split) == ((3 * m, 1),) * 4


# --- what is refused -----------------------------------------------------------------------------

RIGHT = "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD"


@pytest.mark.parametrize(
    "row, words",
    [
        ("0F0 0B0 0REDUCE_GRAD 0UNSHARD 0RESHARD", "runs 0F0 without 0UNSHARD before it"),
        (
            "0UNSHARD 0F0 0RESHARD 0B0 0REDUCE_GRAD",
            "runs 0B0 after 0RESHARD and without 0UNSHARD before it: stage 0 is in shards",
        ),
        ("0UNSHARD 0F0 0I0 0RESHARD 0W0 0REDUCE_GRAD", "runs 0W0 after 0RESHARD"),
        (
            "0UNSHARD 0F0 0B0 0RESHARD",
            "runs 0B0 and never reduces its gradient: no 0REDUCE_GRAD follows",
        ),
        (
            "0UNSHARD 0F0 0REDUCE_GRAD 0B0 0REDUCE_GRAD 0RESHARD",
            "runs 0REDUCE_GRAD without a backward since the last reduction",
        ),
        ("0F0 0F1 0B0 0REDUCE_GRAD 0B1", "runs 0B1 and never reduces its gradient"),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "0REDUCE_GRAD without a backward since"),
        ("0F0 0I0 0REDUCE_GRAD 0W0", "0REDUCE_GRAD without a backward since"),
        (
            "0UNSHARD 0F0 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD",
            "runs 0UNSHARD where stage 0 is gathered already",
        ),
        (f"{RIGHT} 0RESHARD", "runs 0RESHARD where stage 0 is not gathered"),
        (
            "0UNSHARD 0F0 0B0 0REDUCE_GRAD",
            "runs 0UNSHARD and never frees stage 0: no 0RESHARD follows",
        ),
        ("0F0 0B0 0REDUCE_GRAD 0U1", "ZeRO's actions and updates do not go together"),
    ],
)
def test_a_wrong_place_is_refused(row, words):
    check(Schedule([RIGHT]))
    with pytest.raises(ScheduleError, match=words) as caught:
        check(Schedule([row]))
    assert caught.value.rank == 0
    assert str(caught.value.action) in row.split()


def test_a_stage_that_others_reduce_is_reduced_too():
    with pytest.raises(ScheduleError, match="rank 1 runs 1B0 and never reduces its gradient"):
        check(Schedule(["0F0 0B0 0REDUCE_GRAD", "1F0 1B0"]))


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(ScheduleError, match="rank 0 has 0U1 already: give a schedule with a flush"):
        with_sharding(schedules.pipedream(2, 2), 3)
    once = with_sharding(schedules.gpipe(2, 2), 2)
    with pytest.raises(ScheduleError, match="rank 0 has 0REDUCE_GRAD already"):
        with_sharding(once, 3)
    with pytest.raises(ScheduleError, match="rank 0 forgets 0B0"):
        with_sharding(Schedule(["0F0"]), 3)
    with pytest.raises(
        ValueError, match=r"stage is 2 or 3, not 1: .* ZeroRedundancyOptimizer does"
    ):
        with_sharding(schedules.gpipe(2, 2), 1)
    with pytest.raises(ValueError, match="at stage 2 all parameters stay whole"):
        with_sharding(schedules.gpipe(2, 2), 2, keep=1)
    for keep in (-1, 1.5):
        with pytest.raises(ValueError, match=f"at least 0, or None, not {keep}"):
            with_sharding(schedules.gpipe(2, 2), 3, keep=keep)


# --- time ----------------------------------------------------------------------------------------


def test_transfers_run_behind_the_work_one_after_the_other():
    """The second gather waits for the first, and the first backward for neither."""
    schedule = Schedule(
        ["0UNSHARD 0F0 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 0RESHARD"]
    )
    line = simulate(schedule, 1, 2, unshard=[2, 3], reduce_grad=4)
    assert [(str(action), start, end) for action, start, end in line[0]] == [
        ("0UNSHARD", 0, 2),
        ("0F0", 2, 3),
        ("1UNSHARD", 3, 6),
        ("1F0", 6, 7),
        ("1B0", 7, 9),
        ("1REDUCE_GRAD", 9, 13),
        ("1RESHARD", 9, 9),
        ("0B0", 9, 11),
        ("0REDUCE_GRAD", 13, 17),
        ("0RESHARD", 11, 11),
    ]
    assert (line.cost, line.busy, line.peak_activations) == (17, (6,), (1.0,))


def test_a_gather_ahead_of_its_use_costs_no_time():
    ahead = Schedule(
        ["0UNSHARD 1UNSHARD 0F0 1F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD 0RESHARD 1RESHARD"]
    )
    late = Schedule(
        ["0UNSHARD 0F0 1UNSHARD 1F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD 0RESHARD 1RESHARD"]
    )
    assert simulate(ahead, 1, 2, unshard=1).cost == 7
    assert simulate(late, 1, 2, unshard=1).cost == 8


@given(right_schedules(updates=False), ways)
def test_transfers_that_take_no_time_change_nothing(schedule, way):
    plain = simulate(schedule, Fraction(1), Fraction(2))
    line = simulate(with_sharding(schedule, **way), Fraction(1), Fraction(2))
    for row, with_transfers in zip(plain, line, strict=True):
        assert row == tuple(span for span in with_transfers if span.action.kind not in SHARDING)
    assert line.busy == plain.busy
    assert line.peak_activations == plain.peak_activations


def test_gpipe_kept_for_a_step_waits_for_its_first_gather_and_its_last_reduction():
    p, m, gather, reduce = 4, 8, Fraction(3), Fraction(5)
    plain = simulate(schedules.gpipe(p, m), Fraction(1), Fraction(2))
    line = simulate(
        with_sharding(schedules.gpipe(p, m), 3), 1, 2, unshard=gather, reduce_grad=reduce
    )
    assert line.cost == plain.cost + gather + reduce


# --- bytes ---------------------------------------------------------------------------------------


def test_bytes_of_a_stage():
    """4 ranks, 1000 parameters in bf16: three quarters of 2000 bytes for each transfer."""
    assert costs.pipeline_zero_bytes_sent(1000, 4) == 2 * 1500
    assert costs.pipeline_zero_bytes_sent(1000, 4, 16, 1) == 17 * 1500
    assert costs.pipeline_zero_bytes_sent(1000, 4, 0, 1, "fp32") == 3000
    assert costs.pipeline_zero_bytes_sent(1000, 1, 16, 1) == 0
    assert costs.pipeline_zero_bytes(1000, 4, 0) == 500
    assert costs.pipeline_zero_bytes(2000, 4, 1000, "fp32") == 2000 + 4000


def test_the_count_is_of_the_rows():
    schedule = with_sharding(schedules.interleaved(2, 4, 2), 3, keep=1)
    names = Counter(name for row in str(schedule).splitlines() for name in row.split())
    for stage, (gathers, reductions) in enumerate(transfers(schedule)):
        assert (gathers, reductions) == (names[f"{stage}UNSHARD"], names[f"{stage}REDUCE_GRAD"])
        assert gathers > reductions == 1
