"""The journey of a micro-batch: what moves, when, what stands still, and what it refuses."""

import re
from fractions import Fraction
from xml.etree import ElementTree

import pytest

from naranhi import schedules, show
from naranhi.show import _figure, _journey

SVG = f"{{{_figure.SVG}}}"


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(
        _journey, "display", lambda data, raw, metadata=None: outputs.append((data, metadata))
    )
    return outputs


def alone(stages=3, latency=Fraction(1, 2), **times):
    return schedules.simulate(schedules.inter_layer(stages, 1), latency=latency, **times)


def html(shown, timeline=None, **options):
    show.journey(timeline or alone(), **options)
    ((data, metadata),) = shown
    shown.clear()
    assert metadata is None
    assert data["text/plain"].startswith("[figure: A micro-batch goes through")
    return data["text/html"]


def parts(text):
    """The style sheet, and the parsed <svg>."""
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    return style, ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])


def stops(text):
    """Where the frame is when: [(percent, x, y)]."""
    frames = re.search(r"@keyframes [^{]+\{(.*)\}\n", parts(text)[0])[1]
    number = r"([\d.]+)"
    found = re.findall(
        rf"{number}%,{number}%\{{transform:translate\({number}px,{number}px\)\}}", frames
    )
    return [(float(at), float(x), float(y)) for *times, x, y in found for at in times]


def test_the_frame_goes_from_box_to_box_there_and_back(shown):
    places = stops(html(shown))
    assert [at for at, _, _ in places] == sorted(at for at, _, _ in places)
    assert places[0][0] == 0 and places[-1][0] == 100
    corners = [(x, y) for _, x, y in places[::2]]
    assert corners == [(x, y) for _, x, y in places[1::2]]  # it rests for as long as it works
    there, back = corners[:3], corners[3:]
    assert len({y for _, y in there}) == len({y for _, y in back}) == 1
    assert [x for x, _ in there] == sorted({x for x, _ in there})
    assert [x for x, _ in back] == [x for x, _ in reversed(there)]


def test_times_are_those_of_the_timeline(shown):
    timeline = alone(latency=1, forward=2, backward=4)
    places = stops(html(shown, timeline))
    begins = sorted(span.start for row in timeline for span in row)
    share = (1 - _journey.REST) * 100 / timeline.cost
    assert [at for at, _, _ in places[::2]] == pytest.approx(
        [start * share for start in begins], abs=0.01
    )


def test_it_needs_no_script_and_moves_only_for_readers_who_want_motion(shown):
    text = html(shown)
    assert "<script" not in text
    assert not re.search(r"(src|href)=\"(?!#)|url\((?!#)", text)
    style, root = parts(text)
    still, moving = style.split("@media screen and (prefers-reduced-motion:no-preference){")
    assert "animation" not in still and "display:none" in still  # the box to tick, without use
    assert moving.count("infinite}") == 1
    assert ":checked~svg *{animation-play-state:paused}" in moving
    (frame,) = (one for one in root.iter(f"{SVG}rect") if one.get("class") == "frame")
    assert frame.get("display") == "none"
    assert "forward passes" in root.get("aria-label")


def test_the_same_journey_gives_the_same_bytes_and_another_pace_other_names(shown):
    first = html(shown)
    assert html(shown) == first
    other = html(shown, seconds=5)
    names = [re.match(r'<div class="(n[0-9a-f]{8})">', text)[1] for text in (first, other)]
    assert names[0] != names[1]
    for name, text in zip(names, (first, other), strict=True):
        assert set(re.findall(r"@keyframes ([^{]+)", text)) == {name}


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.inter_layer(2, 2),
        schedules.interleaved(2, 2, 2),
        schedules.Schedule("1F0 1B0\n0F0 0B0"),
    ],
    ids=["two", "chunks", "another way"],
)
def test_only_one_micro_batch_through_a_stage_on_each_rank(schedule):
    with pytest.raises(ValueError, match="one micro-batch"):
        show.journey(schedules.simulate(schedule))


def test_a_round_takes_time():
    with pytest.raises(ValueError, match="seconds must be above 0, not 0"):
        show.journey(alone(), seconds=0)
