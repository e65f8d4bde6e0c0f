"""Weight versions and staleness, as they follow from schedules without a flush."""

import pytest
from drawn_schedules import right_schedules
from hypothesis import given
from hypothesis import strategies as st

from naranhi import schedules
from naranhi.schedules import Action, Schedule, ScheduleError

stages = st.integers(1, 7)


def held_by_definition(row, place, stage):
    """Versions after the action at `place`: the newest, and what a later action on the row reads.

    Looks at the whole row each time, so that nothing has to be kept in mind.
    """
    newest = max((a.version for a in row[: place + 1] if a[:2] == (stage, "U")), default=0)
    reads = {a.microbatch: a.version for a in row if a[:2] == (stage, "F")}
    later = {reads[a.microbatch] for a in row[place + 1 :] if a.stage == stage and a.kind != "U"}
    return len({newest} | {version for version in later if version <= newest})


@given(right_schedules())
def test_as_many_as_are_needed_and_no_more(schedule):
    counts = schedules.live_versions(schedule)
    assert counts == tuple(
        tuple(held_by_definition(row, place, action.stage) for place, action in enumerate(row))
        for row in schedule
    )
    most = [1] * schedule.virtual_stages
    for row, its in zip(schedule, counts, strict=True):
        for action, count in zip(row, its, strict=True):
            most[action.stage] = max(most[action.stage], count)
    assert schedules.peak_versions(schedule) == tuple(most)


@given(right_schedules())
def test_nothing_is_released_before_its_last_use(schedule):
    """Every version but a stage's last is released once, and read by nobody afterwards."""
    for row, released in zip(schedule, schedules.releases(schedule), strict=True):
        made = {(a.stage, a.version) for a in row if a.kind == "U"}
        everyone = made | {(a.stage, 0) for a in row}
        last = {(s, max(v for t, v in everyone if t == s)) for s, _ in everyone}
        assert sorted(released.values()) == sorted(everyone - last)
        reads = {(a.stage, a.microbatch): a.version for a in row if a.kind == "F"}
        for place, (stage, version) in released.items():
            for later in row[place + 1 :]:
                if later.stage == stage and later.kind != "U":
                    assert reads[stage, later.microbatch] != version
                elif later.stage == stage:
                    assert later.version - 1 != version  # an update changes the version before


@given(right_schedules(updates=False))
def test_with_a_flush_there_is_one_version(schedule):
    assert schedules.peak_versions(schedule) == (1,) * schedule.virtual_stages
    assert schedules.staleness(schedule) == ((),) * schedule.virtual_stages
    assert set(schedules.versions_read(schedule)) == {(0,) * schedule.virtual_stages}
    schedules.check_versions(schedule, 1)


# --- PipeDream -----------------------------------------------------------------------------------


@given(stages, st.integers(1, 12))
def test_pipedream_reads_the_newest_weights(p, m):
    schedule = schedules.pipedream(p, m)
    for row in schedule:
        newest = 0
        for action in row:
            if action.kind == "U":
                newest = action.version
            elif action.kind == "F":
                assert action.version == newest


@given(stages, st.integers(0, 9))
def test_pipedream_holds_p_minus_stage_versions(p, more):
    """In the steady state; but for the moments between a backward and the update that follows."""
    schedule = schedules.pipedream(p, 2 * p + more)
    assert schedules.peak_versions(schedule) == tuple(p - stage for stage in range(p))
    for stage, row in enumerate(schedule):
        counts = schedules.live_versions(schedule)[stage]
        ahead = p - stage
        first = row.index(Action(stage, "U", None, ahead))
        last = max(place for place, action in enumerate(row) if action.kind == "F")
        for place in range(first, last + 1):
            fewer = row[place].kind == "B" and ahead > 1
            assert counts[place] == ahead - fewer


@given(stages, st.integers(1, 12))
def test_staleness_of_pipedream(p, m):
    """min(k, p - 1 - stage) for update k: its gradient is that of p - 1 - stage updates ago."""
    assert schedules.staleness(schedules.pipedream(p, m)) == tuple(
        tuple(min(k, p - 1 - stage) for k in range(m)) for stage in range(p)
    )


def test_pipedream_has_no_vertical_sync():
    assert schedules.versions_read(schedules.pipedream(3, 5)) == (
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
    )


# --- 2BW -----------------------------------------------------------------------------------------


@given(stages, st.integers(1, 9))
def test_two_buffered_holds_two_versions(p, m):
    """Where m >= p - 1 (the paper asks for p); below, as many as the delay asks for."""
    delay = max(1, -(-(p - 1) // m))
    schedule = schedules.pipedream_2bw(p, m, 2 * delay + 2)
    assert schedules.peak_versions(schedule) == (delay + 1,) * p
    assert delay == 1 or m < p - 1
    assert set(schedules.staleness(schedule)) == {
        tuple(min(batch, delay) for batch in range(2 * delay + 2))
    }


def test_two_buffered_by_hand():
    assert schedules.peak_versions(schedules.pipedream_2bw(4, 4, 6)) == (2, 2, 2, 2)
    assert schedules.peak_versions(schedules.pipedream_2bw(4, 2, 6)) == (3, 3, 3, 3)
    assert schedules.peak_versions(schedules.pipedream_2bw(4, 1, 6)) == (4, 4, 4, 4)
    assert schedules.staleness(schedules.pipedream_2bw(4, 4, 4))[0] == (0, 1, 1, 1)


@given(st.integers(2, 7), st.integers(1, 9))
def test_two_buffered_could_not_be_less_stale(p, m):
    """With the delay of a version less, a forward would read what is not made yet."""
    schedule = schedules.pipedream_2bw(p, m, 8)
    delay = max(1, -(-(p - 1) // m))
    rows = [
        [
            a._replace(version=max(0, a.microbatch // m - delay + 1)) if a.kind == "F" else a
            for a in row
        ]
        for row in schedule
    ]
    with pytest.raises(ScheduleError, match="is not made before it"):
        schedules.check(Schedule(rows))


@given(stages, st.integers(1, 9))
def test_two_buffered_is_in_vertical_sync(p, m):
    """All stages read the same version, so that one process can repeat it."""
    assert all(
        len(set(read)) == 1 for read in schedules.versions_read(schedules.pipedream_2bw(p, m, 3))
    )


# --- other schedules -----------------------------------------------------------------------------


def test_split_backwards_hold_their_version_until_the_gradient_of_the_weights():
    schedule = Schedule("0F0 0I0 0F1 0W0 0U1 0I1 0W1 0U2")
    assert schedules.live_versions(schedule) == ((1, 1, 1, 1, 2, 2, 1, 1),)
    assert schedules.releases(schedule) == ({6: (0, 0), 7: (0, 1)},)
    assert schedules.staleness(schedule) == ((0, 1),)


def test_of_several_gradients_the_stalest_counts():
    schedule = Schedule("0F0 0F1 0B0 0U1 0F2@1 0B2 0B1 0U2")
    assert schedules.staleness(schedule) == ((0, 1),)


# --- bounds --------------------------------------------------------------------------------------


def test_more_versions_than_allowed_are_named():
    schedule = schedules.pipedream(4, 10)
    schedules.check_versions(schedule, 4)
    schedules.check_versions(schedule, (4, 3, 2, 1))
    with pytest.raises(ScheduleError) as error:
        schedules.check_versions(schedule, [4, 2, 2, 2])
    assert str(error.value) == (
        "rank 1 holds 3 versions of stage 1's weights after 1U2: the schedule needs 3 at once, "
        "and 2 are allowed"
    )
    assert (error.value.rank, error.value.action) == (1, Action(1, "U", None, 2))
    with pytest.raises(ScheduleError, match="needs 4 at once, and 1 is allowed"):
        schedules.check_versions(schedule, 1)


@pytest.mark.parametrize(
    "most, message",
    [
        (0, "1 or more, not 0"),
        (2.0, "1 or more, not 2.0"),
        ([2, 2], "2 bounds for 3 virtual stages"),
        ([2, 2, None], "1 or more, not None"),
    ],
)
def test_bounds_that_make_no_sense_are_named(most, message):
    with pytest.raises(ValueError, match=message):
        schedules.check_versions(schedules.pipedream(3, 3), most)


def test_what_check_refuses_is_refused_here_too():
    for function in (
        schedules.peak_versions,
        schedules.versions_read,
        schedules.staleness,
        schedules.releases,
        schedules.live_versions,
    ):
        with pytest.raises(ScheduleError, match="rank 0 forgets 0B0"):
            function(Schedule("0F0"))
