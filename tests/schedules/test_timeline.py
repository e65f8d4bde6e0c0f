import json
from fractions import Fraction

import pytest

from naranhi import measure, schedules, show
from naranhi.show import _figure, _timeline


@pytest.fixture
def shown(monkeypatch):
    """What was displayed: (data by MIME type, metadata), in order."""
    outputs = []
    monkeypatch.setattr(
        _figure, "display", lambda data, raw, metadata=None: outputs.append((data, metadata))
    )
    return outputs


def gpipe():
    return schedules.simulate(schedules.gpipe(2, 3), forward=1, backward=2)


def test_a_trace_has_every_action_in_microseconds(tmp_path):
    line = gpipe()
    measure.write_trace(line, tmp_path / "trace.json", unit=Fraction(1, 1000))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1"}
    boxes = [event for event in events if event["ph"] == "X"]
    assert [(box["tid"], box["name"], box["ts"], box["ts"] + box["dur"]) for box in boxes] == [
        (rank, str(span.action), span.start * 1000, span.end * 1000)
        for rank, row in enumerate(line)
        for span in row
    ]
    assert boxes[0]["args"] == {"stage": 0, "micro-batch": 0}


def test_a_recorder_takes_down_actions_in_order_and_forgets():
    recorder, actions = measure.Recorder(), schedules.gpipe(1, 2)[0]
    for action in actions:
        recorder.begin()
        recorder.end(action)
    line = schedules.Timeline([recorder._spans])
    assert tuple(action for action, _, _ in line[0]) == actions
    recorder.clear()
    assert not recorder._spans


def test_boxes_stand_where_the_actions_are():
    fig = _timeline.draw_timeline(gpipe())
    fig.draw_without_rendering()
    ax = fig.axes[0]
    boxes = [patch.get_bbox() for patch in ax.patches]
    spans = [(rank, span) for rank, row in enumerate(gpipe()) for span in row]
    assert len(boxes) == len(spans)
    for box, (rank, (_, start, end)) in zip(boxes, spans, strict=True):
        assert (box.x0, int(box.y0)) == (start, rank)
        assert end - 0.2 < box.x1 < end
    assert [text.get_text() for text in ax.texts] == [
        str(span.action.microbatch) for _, span in spans
    ]
    key = [text.get_text() for text in ax.get_legend().get_texts()]
    assert key == ["forward", "backward"]


def test_measured_and_simulated_are_one_drawing(shown):
    show.timeline(gpipe())
    show.timeline(gpipe())
    show.timeline(gpipe(), measured=True, end=20)
    (one, plain), (again, _), (other, mark) = shown
    assert one == again and plain is None
    assert mark == {"naranhi": {"measured": True}}
    assert "simulated timeline of 2 ranks, in which 25%" in one["text/html"]
    assert "Rank 1: 1F0, 1F1, 1F2, 1B0, 1B1, 1B2." in one["text/html"]
    assert "measured timeline of 2 ranks" in other["text/html"]


def test_numbers_go_where_there_is_no_room_for_them():
    fig = _timeline.draw_timeline(schedules.simulate(schedules.gpipe(8, 256)))
    assert not fig.axes[0].texts
    with pytest.raises(ValueError, match="end = 3 is before the end"):
        _timeline.draw_timeline(gpipe(), end=3)


def test_rows_of_any_kind_become_tuples():
    spans = [
        schedules.Span(schedules.Action.parse("0F0"), 0, 1),
        schedules.Span(schedules.Action.parse("0B0"), 1, 3),
    ]
    timeline = schedules.Timeline(iter([iter(spans)]))
    assert timeline.rows == (tuple(spans),)
    assert hash(timeline) == hash(schedules.Timeline((tuple(spans),)))
