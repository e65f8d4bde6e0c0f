"""A trace that is written and read again is the same timeline."""

import json
from fractions import Fraction

import pytest
from drawn_schedules import right_schedules
from hypothesis import given
from hypothesis import strategies as st

from naranhi import measure, schedules


@given(right_schedules(), st.floats(0.001, 3), st.floats(0.001, 3))
def test_a_trace_is_read_as_it_was_written(tmp_path_factory, schedule, forward, backward):
    line = schedules.simulate(schedule, forward, backward, latency=0.1)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    measure.write_trace(line, path)
    read = schedules.read_trace(path.read_text())
    for row, again in zip(line, read, strict=True):
        assert [span.action for span in row] == [span.action for span in again]
        for (_, start, end), (_, begun, done) in zip(row, again, strict=True):
            assert (begun, done) == pytest.approx((start, end), abs=1e-9)


def test_a_pair_that_runs_at_the_same_time_stays_one(tmp_path):
    line = schedules.simulate(schedules.dualpipe_v(2, 4), overlapped=Fraction(5, 2))
    measure.write_trace(line, tmp_path / "trace.json")
    assert schedules.read_trace((tmp_path / "trace.json").read_text()).rows == line.rows


@pytest.mark.parametrize(
    "forward, backward, unit", [(0.0012345675, 0.0023456785, 1.0), (1001, 2001, 0.5e-9)]
)
def test_times_that_are_rounded_apart_do_not_overlap(tmp_path, forward, backward, unit):
    line = schedules.simulate(schedules.one_f_one_b(4, 8), forward, backward)
    measure.write_trace(line, tmp_path / "trace.json", unit=unit)
    read = schedules.read_trace((tmp_path / "trace.json").read_text())
    assert read.peak_activations == line.peak_activations
    assert read.cost == pytest.approx(line.cost * unit, abs=2e-9)


def event(**changed):
    return {"ph": "X", "name": "0F0", "tid": 0, "ts": 0, "dur": 1, **changed}


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not a trace: it is not JSON"),
        ("[" * 100_000, "not a trace: it is not JSON"),
        ("3", "not a trace: there is no list of traceEvents"),
        ("[]", "not a trace: no event has a duration"),
        (json.dumps([event(name="GC")]), "not an action of a schedule: 'GC' is not an action"),
        (json.dumps([event(ts="a")]), "event '0F0' of the trace: tid, ts and dur have to be"),
        (json.dumps([event(dur=-1)]), "event '0F0' of the trace: tid, ts and dur have to be"),
        (json.dumps([event(ts=1e308)]), "dur have to be numbers from 0 to 1e.18"),
        (json.dumps([event(ts=10**400)]), "dur have to be numbers from 0 to 1e.18"),
        (json.dumps([event(tid=2)]), "the trace has 1 threads with actions, but no tid 0"),
        (json.dumps([event(), event(name="0B0", ts=0.5)]), "but it was busy until"),
    ],
)
def test_what_is_no_trace_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        schedules.read_trace(text)
