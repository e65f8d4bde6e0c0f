"""Schedules: their names, what `check` refuses and why, their messages, and CSV."""

import pickle
import subprocess
import sys
from collections import Counter, defaultdict, deque

import own_schedules
import pytest
from drawn_schedules import microbatches, right_schedules, stages
from hypothesis import given, settings
from hypothesis import strategies as st

from naranhi import schedules
from naranhi.schedules import Action, Channel, Message, Schedule, ScheduleError

# --- names ---------------------------------------------------------------------------------------

numbers = st.integers(0, 9999)
actions = st.builds(Action, numbers, st.sampled_from("FBIW"), numbers, st.just(0))
actions |= st.builds(Action, st.integers(0, 9), st.just("F"), st.integers(0, 9), st.integers(0, 9))
actions |= st.builds(Action, st.integers(0, 99), st.just("U"), st.none(), st.integers(1, 99))


@given(actions)
def test_an_action_is_parsed_from_its_name(action):
    assert Action.parse(str(action)) == action


def test_names_are_torchs():
    assert str(Action(2, "F", 0)) == "2F0"
    assert str(Action(2, "B", 0)) == "2B0"
    assert str(Action(12, "I", 345)) == "12I345"
    assert str(Action(0, "W", 1)) == "0W1"
    assert str(Action(2, "U", None, 1)) == "2U1"
    assert str(Action(2, "F", 5, version=1)) == "2F5@1"
    assert repr(schedules.gpipe(2, 1)[1]) == "(1F0, 1B0)"


@pytest.mark.parametrize("name", ["", "F0", "2F", "2X0", "2F-1", "2F0x", "x2F0", "2B0@1", "2U1@1"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(name)


@pytest.mark.parametrize(
    "item",
    [
        Action(0, "X", 0),
        Action(-1, "F", 0),
        Action(0, "F", -1),
        Action(0, "F", None),
        Action(0, "F", 0, -1),
        Action(0, "B", 0, 1),
        Action(0.5, "F", 0),
        (0, "F", 0),
        None,
    ],
)
def test_a_schedule_is_made_of_actions(item):
    with pytest.raises(ScheduleError, match=r"rank 1: .* is not an action"):
        Schedule([[Action(0, "F", 0)], [item]])


@given(right_schedules())
def test_a_schedule_is_built_from_what_it_prints(schedule):
    assert Schedule(str(schedule)) == schedule
    assert eval(repr(schedule)) == schedule
    assert Schedule([str(action) for action in row] for row in schedule).rows == schedule.rows
    assert hash(Schedule(str(schedule).splitlines())) == hash(schedule)


# --- schedules -----------------------------------------------------------------------------------


def test_the_diagrams():
    assert schedules.inter_layer(2, 2) == Schedule("""
        0F0 0B0 0F1 0B1
        1F0 1B0 1F1 1B1
    """)
    assert schedules.gpipe(3, 2) == Schedule("""
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2F1 2B0 2B1
    """)


def test_what_a_schedule_knows():
    plain = schedules.gpipe(3, 8)
    assert (plain.stages, plain.virtual_stages, plain.microbatches) == (3, 3, 8)
    assert plain.placement == (0, 1, 2) and len(plain) == 3
    looped = own_schedules.looped(2, 4, 3)
    assert (looped.stages, looped.virtual_stages, looped.microbatches) == (2, 6, 4)
    assert looped.placement == (0, 1, 0, 1, 0, 1)
    assert own_schedules.there_and_back(3, 1).placement == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("generator", [schedules.inter_layer, schedules.gpipe])
def test_a_number_that_makes_no_schedule_is_named(generator):
    for numbers, message in [
        ((0, 4), "stages must be a whole number of at least 1, not 0"),
        ((4, 0), "microbatches must be a whole number of at least 1, not 0"),
        ((4, 2.0), "microbatches must be a whole number of at least 1, not 2.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            generator(*numbers)


# --- check ---------------------------------------------------------------------------------------


@given(right_schedules())
def test_what_is_right_passes(schedule):
    schedules.check(schedule)


GPIPE = "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"
FLUSHLESS = "0F0 0B0 0U1 0F1@1 0B1 0U2\n1F0 1B0 1U1 1F1@1 1B1 1U2"
BAD = {
    "forgets a forward": (
        GPIPE.replace("1F0 ", "").replace("1B0 ", ""),
        "rank 1 forgets 1F0",
    ),
    "forgets a backward": (GPIPE.replace("1B0 ", ""), "rank 1 forgets 1B0"),
    "forgets the gradient of the weights": (
        GPIPE.replace("0B0", "0I0"),
        "rank 0 forgets 0W0",
    ),
    "fewer micro-batches on one stage": (
        GPIPE.replace(" 1F1", "").replace(" 1B1", ""),
        "stages disagree on the number of micro-batches: stage 1 has 1, another has 2; "
        "rank 1 lacks 1F1",
    ),
    "more micro-batches on one stage": (
        GPIPE + " 1F2 1B2",
        "stages disagree on the number of micro-batches: stage 0 has 2, another has 3; "
        "rank 0 lacks 0F2",
    ),
    "repeats a forward": (GPIPE.replace("1F1", "1F0"), "rank 1 repeats 1F0"),
    "repeats a backward": (GPIPE + " 1B1", "rank 1 repeats 1B1"),
    "repeats the gradient of the weights": (
        GPIPE.replace("1B1", "1I1 1W1 1W1"),
        "rank 1 repeats 1W1",
    ),
    "a backward before its forward": (
        "0F0 0F1 0B0 0B1\n1F0 1B1 1F1 1B0",
        "rank 1 runs 1B1 without 1F1 before it",
    ),
    "a gradient of the weights before that of the input": (
        GPIPE.replace("1B0", "1W0 1I0"),
        "rank 1 runs 1W0 without 1I0 before it",
    ),
    "a whole backward and half a one": (
        GPIPE.replace("1B0", "1B0 1W0"),
        "rank 1 runs 1W0 after 1B0: a backward is one B, or one I and one W",
    ),
    "half a backward and a whole one": (
        GPIPE.replace("1B0", "1I0 1B0"),
        "rank 1 runs 1B0 after 1I0: a backward is one B, or one I and one W",
    ),
    "both ranks wait for each other": (
        "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
        "deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, rank 1 waits at 1F1 for 0F1 of rank 0",
    ),
    "a third rank only suffers": (
        "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1",
        "deadlock: rank 1 waits at 1B0 for 2B0 of rank 2, rank 2 waits at 2F1 for 1F1 of rank 1",
    ),
    "the way back of a V crosses the way there": (
        "0F0 3F0 0B0 3B0\n1F0 2F0 2B0 1B0",
        "deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, rank 1 waits at 2B0 for 3B0 of rank 0",
    ),
    "a rank that runs its own two stages backwards": (
        "1F0 0F0 1B0 0B0",
        "deadlock: rank 0 waits at 1F0 for 0F0 of rank 0",
    ),
    "the ends disagree on the order of activations": (
        "0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1",
        "rank 0 and rank 1 disagree on the order of activations: rank 0 sends that of 0F0 where "
        "rank 1 expects that for 1F1",
    ),
    "the ends disagree on the order of gradients": (
        "0F0 0F1 0B0 0B1\n1F0 1F1 1B1 1B0",
        "rank 1 and rank 0 disagree on the order of gradients: rank 1 sends that of 1B1 where "
        "rank 0 expects that for 0B0",
    ),
    "two stages' messages on one channel in two orders": (
        "0F0 0F1 2F0 2B0 0B0 2F1 2B1 0B1\n1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1",
        "rank 0 and rank 1 disagree on the order of activations: rank 0 sends that of 0F1 where "
        "rank 1 expects that for 3F0",
    ),
    "a stage on two ranks": (
        "0F0 0F1 0B0 0B1\n1F0 0F1 1B0 1B1",
        "rank 1 runs 0F1, but stage 0 is on rank 0: a stage is on one rank",
    ),
    "a stage on no rank": (
        "0F0 0B0\n2F0 2B0",
        "rank 1 runs 2F0, but no rank runs stage 1",
    ),
    "a rank with nothing to do": ("0F0 0B0\n\n1F0 1B0", "rank 1 has nothing to do"),
    "no rank": ("", "a schedule has at least one rank"),
    "a version that is not there yet": (
        FLUSHLESS.replace("1F1@1", "1F1@2"),
        "rank 1 runs 1F1@2, but version 2 of stage 1's weights is not made before it: 1 is the "
        "newest",
    ),
    "a version in a schedule that makes none": (
        GPIPE.replace("0F1", "0F1@1"),
        "rank 0 runs 0F1@1, but version 1 of stage 0's weights is not made before it: 0 is the "
        "newest",
    ),
    "an update out of turn": (
        FLUSHLESS.replace("1U2", "1U3"),
        "rank 1 runs 1U3 where 1U2 is due",
    ),
    "an update with nothing to apply": (
        FLUSHLESS + " 1U3",
        "rank 1 runs 1U3, but no backward since the last update gave it a gradient to apply",
    ),
    "an update before the weights have a gradient": (
        FLUSHLESS.replace("1B0 1U1", "1I0 1U1 1W0"),
        "rank 1 runs 1U1, but no backward since the last update gave it a gradient to apply",
    ),
    "a gradient that is never applied": (
        FLUSHLESS.replace(" 1U2", ""),
        "rank 1 never applies the gradient of 1B1: no update follows it",
    ),
    "a stage that never updates where another does": (
        FLUSHLESS.replace(" 0U1", "").replace(" 0U2", "").replace("0F1@1", "0F1"),
        "rank 0 never applies the gradient of 0B1: no update follows it",
    ),
}


@pytest.mark.parametrize("text, message", BAD.values(), ids=BAD)
def test_what_is_wrong_is_named(text, message):
    schedule = Schedule(text)
    with pytest.raises(ScheduleError) as error:
        schedules.check(schedule)
    assert str(error.value) == message
    if error.value.action:
        assert str(error.value.action) in message
        assert f"rank {error.value.rank}" in message
    with pytest.raises(ScheduleError):
        schedules.simulate(schedule)


def test_the_error_reaches_another_process_whole():
    error = ScheduleError("rank 1 forgets 1F0", 1, Action(1, "F", 0))
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.rank, other.action) == (str(error), error.rank, error.action)


def really_runs(schedule):
    """Whether ranks that do their rows, with one first-in-first-out queue per channel, end well.

    Written from the rules alone: a queue hands out its oldest message, whichever it is.
    """
    where = {action.stage: rank for rank, row in enumerate(schedule) for action in row}
    last, count = max(where), schedule.microbatches
    home = all(where[a.stage] == rank for rank, row in enumerate(schedule) for a in row)
    if not home or len(where) != last + 1 or not all(schedule):
        return False
    queues, at_home, did = defaultdict(deque), set(), Counter()
    position, moved = [0] * len(schedule), True
    while moved:
        moved = False
        for rank, row in enumerate(schedule):
            if position[rank] == len(row):
                continue
            stage, kind, k, _ = row[position[rank]]
            before = {"F": None, "B": (stage, "F", k), "I": (stage, "F", k), "W": (stage, "I", k)}
            if before[kind] and not did[before[kind]]:
                return False
            # Who hands me something, to whom I hand something, and of what kind it is.
            way = {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
            source, target = stage - way, stage + way
            if way and 0 <= source <= last:
                if where[source] == rank:
                    if (source, stage, k) not in at_home:
                        continue
                else:
                    queue = queues[where[source], rank, way]
                    if not queue:
                        continue
                    if queue.popleft() != (source, stage, k):
                        return False
            if way and 0 <= target <= last:
                if where[target] == rank:
                    at_home.add((stage, target, k))
                else:
                    queues[rank, where[target], way].append((stage, target, k))
            did[stage, kind, k] += 1
            position[rank] += 1
            moved = True
    ended = all(place == len(row) for place, row in zip(position, schedule, strict=True))
    once = all(
        did[stage, "F", k] == 1
        and (did[stage, "B", k], did[stage, "I", k], did[stage, "W", k]) in [(1, 0, 0), (0, 1, 1)]
        for stage in where
        for k in range(count)
    )
    return ended and once and not any(queues.values())


@st.composite
def changed_schedules(draw):
    """Right ones, a few of whose actions have been swapped, moved, left out, doubled or renamed."""
    rows = [list(row) for row in draw(right_schedules(updates=False))]
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        if not row:
            continue
        place = draw(st.integers(0, len(row) - 1))
        other = draw(st.integers(max(0, place - 3), min(len(row) - 1, place + 3)))
        match draw(st.sampled_from(["swap", "swap", "move", "omit", "double", "rename", "leave"])):
            case "swap":
                row[place], row[other] = row[other], row[place]
            case "move":
                row.insert(other, row.pop(place))
            case "omit":
                row.pop(place)
            case "double":
                row.insert(other, row[place])
            case "rename":
                row[place] = row[place]._replace(kind=draw(st.sampled_from("FBIW")))
            case "leave":
                draw(st.sampled_from(rows)).append(row.pop(place))
    return Schedule(rows)


@settings(max_examples=600)
@given(changed_schedules())
def test_check_passes_what_really_runs_and_nothing_else(schedule):
    if not any(schedule):
        return
    try:
        schedules.check(schedule)
        passed = True
    except ScheduleError as error:
        passed, message = False, str(error)
    assert passed == really_runs(schedule), "passed" if passed else message


def test_both_outcomes_are_among_the_changed_schedules():
    """Or the test above would show nothing."""
    found = Counter()

    @settings(max_examples=200, database=None, derandomize=True)
    @given(changed_schedules())
    def count(schedule):
        changed = any(schedule) and not any(
            schedule == make(schedule.stages, schedule.microbatches)
            for make in (schedules.gpipe, schedules.inter_layer, schedules.one_f_one_b)
        )
        if changed:
            found[really_runs(schedule)] += 1

    count()
    assert found[True] > 20 and found[False] > 20


# --- what follows from a schedule ----------------------------------------------------------------


def test_messages_of_gpipe():
    schedule = schedules.gpipe(3, 2)
    assert schedules.channels(schedule) == {
        Channel(0, 1, "activation"): (Message(0, 1, 0), Message(0, 1, 1)),
        Channel(1, 2, "activation"): (Message(1, 2, 0), Message(1, 2, 1)),
        Channel(2, 1, "gradient"): (Message(2, 1, 0), Message(2, 1, 1)),
        Channel(1, 0, "gradient"): (Message(1, 0, 0), Message(1, 0, 1)),
    }
    assert schedule.needs(Action(0, "F", 1)) is None
    assert schedule.gives(Action(0, "F", 1)) == schedule.needs(Action(1, "F", 1)) == (0, 1, 1)
    assert schedule.gives(Action(2, "F", 1)) is None and schedule.needs(Action(2, "B", 1)) is None
    assert schedule.gives(Action(2, "B", 1)) == schedule.needs(Action(1, "I", 1)) == (2, 1, 1)
    assert schedule.gives(Action(0, "B", 1)) is None and schedule.gives(Action(1, "W", 1)) is None
    assert schedule.needs(Action(1, "W", 1)) is None
    assert schedule.needs(Action(1, "U", None, 1)) is None


def test_a_ring_shares_one_channel_between_chunks():
    """Two ranks with two chunks each: activations of stages 0 and 2 go the same way."""
    found = schedules.channels(own_schedules.looped(2, 2, 2))
    assert found[Channel(0, 1, "activation")] == ((0, 1, 0), (0, 1, 1), (2, 3, 0), (2, 3, 1))
    assert found[Channel(1, 0, "activation")] == ((1, 2, 0), (1, 2, 1))
    assert found[Channel(1, 0, "gradient")] == ((3, 2, 0), (3, 2, 1), (1, 0, 0), (1, 0, 1))


@given(stages, microbatches, st.integers(1, 4))
def test_number_of_messages(p, m, chunks):
    found = schedules.channels(own_schedules.looped(p, m, chunks))
    expected = 2 * m * (p * chunks - 1) if p > 1 else 0
    assert sum(map(len, found.values())) == expected


def test_nothing_travels_within_a_rank():
    schedule = own_schedules.there_and_back(2, 1)
    assert schedule.channel(Message(1, 2, 0)) is None
    assert schedule.channel(Message(2, 1, 0)) is None
    assert schedule.channel(Message(2, 3, 0)) == Channel(1, 0, "activation")
    assert len(schedules.channels(schedule)) == 4


def test_channels_that_lack_an_end_are_refused():
    with pytest.raises(ScheduleError, match="sends that of 0F1 where rank 1 expects that for noth"):
        schedules.channels(Schedule("0F0 0F1\n1F0"))
    with pytest.raises(ScheduleError, match="nothing where rank 1 expects that for 1F1"):
        schedules.channels(Schedule("0F0\n1F0 1F1"))
    with pytest.raises(ScheduleError, match="rank 1 waits at 1F1 for a message that never comes"):
        list(schedules.in_order(Schedule("0F0\n1F0 1F1")))


@given(right_schedules())
def test_one_process_can_do_it_all_in_order(schedule):
    """What is needed is given before, and each rank's actions keep their order."""
    rows, given = [[] for _ in schedule], set()
    for rank, action in schedules.in_order(schedule):
        rows[rank].append(action)
        needed = schedule.needs(action)
        assert needed is None or needed in given
        given.add(schedule.gives(action))
    assert tuple(map(tuple, rows)) == schedule.rows


# --- CSV -----------------------------------------------------------------------------------------


@given(right_schedules(updates=False))
def test_what_is_written_is_read(tmp_path_factory, schedule):
    path = tmp_path_factory.getbasetemp() / "schedule.csv"
    schedules.write_csv(schedule, path)
    assert schedules.read_csv(path) == schedule


def test_the_form_of_a_file(tmp_path):
    path = tmp_path / "schedule.csv"
    schedules.write_csv(schedules.gpipe(2, 2), path)
    assert path.read_text().splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"]
    # Torch's two forms, with idle steps, messages, sharding and a fused pair.
    path.write_text("0F0,,0F1, ,,0I0,0W0,0B1\n,1F0,1I0,(1F1;1W0)OVERLAP_F_B,1B1\n")
    assert schedules.read_csv(path) == Schedule(
        "0F0 0F1 0I0 0W0 0B1\n1F0 1I0 (1F1;1W0)OVERLAP_F_B 1B1"
    )
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    )
    assert schedules.read_csv(path) == schedules.gpipe(2, 1)


def test_what_cannot_be_exchanged_is_named(tmp_path):
    path = tmp_path / "schedule.csv"
    with pytest.raises(ScheduleError, match=r"rank 0: cannot write 0U1, .* no updates"):
        schedules.write_csv(schedules.pipedream(2, 3), path)
    with pytest.raises(ScheduleError, match=r"rank 0: cannot write 0F1@1, .* no versions"):
        schedules.write_csv(Schedule("0F0 0F1@1 0B0 0B1"), path)
    assert not path.exists()
    path.write_text("0F0,0B0\n1F0,1X0\n")
    with pytest.raises(ScheduleError, match=r"schedule\.csv: rank 1: '1X0' is not an action"):
        schedules.read_csv(path)
    path.write_text("")
    with pytest.raises(ScheduleError, match="at least one rank"):
        schedules.check(schedules.read_csv(path))


def test_schedules_need_no_torch():
    code = "import sys, naranhi.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# --- by name -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_torch_names_a_schedule_so_too(name):
    from torch.distributed.pipelining.schedules import get_schedule_class

    torchs = {
        "ScheduleGPipe": schedules.gpipe,
        "Schedule1F1B": schedules.one_f_one_b,
        "ScheduleInterleaved1F1B": schedules.interleaved,
        "ScheduleZBVZeroBubble": schedules.zero_bubble_v,
        "ScheduleDualPipeV": schedules.dualpipe_v,
    }
    assert schedules.get(name) is torchs[get_schedule_class(name).__name__]


def test_a_schedule_is_found_by_its_own_name():
    assert schedules.get("zero_bubble_h1") is schedules.zero_bubble_h1
    with pytest.raises(ValueError, match="schedule 'ZB-H1' does not exist; choose one of inter_la"):
        schedules.get("ZB-H1")
