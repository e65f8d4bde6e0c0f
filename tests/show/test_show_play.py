"""The timeline that runs: what moves, what stands still, and that it is the same picture."""

import re
from xml.etree import ElementTree

import pytest

from naranhi import schedules, show
from naranhi.show import _figure, _play, _timeline

SVG = f"{{{_figure.SVG}}}"


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(
        _play, "display", lambda data, raw, metadata=None: outputs.append((data, metadata))
    )
    return outputs


def line():
    return schedules.simulate(schedules.gpipe(2, 3), forward=1, backward=2)


def html(shown, **options):
    show.play(line(), **options)
    ((data, metadata),) = shown
    assert metadata is None
    assert data["text/plain"].startswith("[figure: A simulated timeline of 2 ranks")
    return data["text/html"]


def parts(text):
    """The style sheet, and the parsed <svg>."""
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    return style, ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])


def test_it_needs_no_script_and_no_other_file(shown):
    text = html(shown)
    assert "<script" not in text
    assert not re.search(r"(src|href)=\"(?!#)|url\((?!#)", text)


def test_everything_that_moves_is_clipped_by_the_one_window_and_the_ranks_names_are_not(shown):
    _, root = parts(html(shown))
    windows = [one for one in root.iter(f"{SVG}rect") if one.get("class") == "window"]
    (clip,) = root.iter(f"{SVG}clipPath")
    assert windows == list(clip)
    clipped = [one for one in root.iter() if one.get("clip-path") == f"url(#{clip.get('id')})"]
    boxes = [one for one in clipped if one.tag == f"{SVG}path"]
    numbers = [one for one in clipped if one.tag == f"{SVG}g"]
    assert len(boxes) == len(numbers) == 2 * 2 * 3  # ranks, kinds, micro-batches
    assert len(clipped) == len(boxes) + len(numbers)


def test_it_moves_only_on_screens_whose_readers_want_motion_and_a_tick_makes_it_pause(shown):
    style, _ = parts(html(shown))
    still, moving = style.split("@media screen and (prefers-reduced-motion:no-preference){")
    assert "animation" not in still and "display:none" in still  # the box to tick, without use
    assert moving.count("infinite}") == 2
    assert ":checked~svg *{animation-play-state:paused}" in moving


def test_without_motion_it_is_the_picture_of_show_timeline(shown):
    _, root = parts(html(shown))
    (now,) = (one for one in root.iter(f"{SVG}line") if one.get("class") == "now")
    assert now.get("opacity") == "0"
    still = ElementTree.fromstring(_figure.svg(_timeline.draw_timeline(line()), "alt"))
    assert root.get("viewBox") == still.get("viewBox")

    def drawn(tree):
        return sorted(one.get("d", "") for one in tree.iter(f"{SVG}path"))

    assert drawn(root) == drawn(still)


def test_the_same_timeline_gives_the_same_bytes_and_another_pace_another_style(shown):
    first = html(shown)
    shown.clear()
    assert html(shown) == first
    shown.clear()
    assert html(shown, seconds=5) != first


def test_names_of_styles_are_those_of_this_picture_alone(shown):
    first = html(shown)
    show.play(schedules.simulate(schedules.gpipe(2, 2)))
    other = shown[1][0]["text/html"]
    names = [re.match(r'<div class="(n[0-9a-f]{8})">', text)[1] for text in (first, other)]
    assert names[0] != names[1]
    for name, text in zip(names, (first, other), strict=True):
        style, _ = parts(text)
        assert set(re.findall(r"@keyframes ([^{-]+)", style)) == {name}


@pytest.mark.parametrize(("options", "named"), [({"seconds": 0}, "0"), ({"end": 1}, "end")])
def test_a_round_takes_time_and_the_axis_holds_the_timeline(options, named):
    with pytest.raises(ValueError, match=named):
        show.play(line(), **options)


def test_one_timeline_at_two_paces_has_two_names(shown):
    """Both may be on one page, and a style holds for all that it names."""
    texts = []
    for seconds in (12, 5):
        texts.append(html(shown, seconds=seconds))
        shown.clear()
    names = [set(re.findall(r"n[0-9a-f]{8}", text)) for text in texts]
    assert [len(own) for own in names] == [1, 1] and names[0] != names[1]
