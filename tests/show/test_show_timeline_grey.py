"""Kinds of action in a timeline are told apart without colour, and their numbers can be read."""

import itertools

import pytest
from matplotlib.colors import to_rgb

from naranhi import schedules
from naranhi.schedules.schedule import SHARDING
from naranhi.show import _colors, _contrast, _figure, _timeline
from naranhi.show._contrast import contrast, luminance, readability, text_on

COLORS = {kind: color for kind, (_, color) in _colors.KINDS.items()}
SCHEDULES = {
    "gpipe": schedules.gpipe(4, 8),
    "two chunks": schedules.interleaved(4, 8, 2),
    "four chunks": schedules.interleaved(2, 4, 4),
    "zero bubble": schedules.zero_bubble_h1(4, 8),
    "no flush": schedules.pipedream(4, 8),
    "gathered": schedules.with_sharding(schedules.one_f_one_b(4, 8), 3, keep=0),
}


def lightness(color):
    """How light a colour looks in grey, from 0 to 100: L* of CIE 1976, whose unit is about what an
    eye can just tell apart; 16 greys, as of e-ink, are 6.7 apart."""
    return 116 * luminance(color) ** (1 / 3) - 16


def drawn(name):
    """The kinds of action that a schedule has, and its figure."""
    line = schedules.simulate(SCHEDULES[name])
    kinds = {action.kind for row in line for action, _, _ in row}
    return kinds, _timeline.draw_timeline(line)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_stands_in_one_timeline_is_told_apart_in_grey(name):
    kinds, fig = drawn(name)
    fills = {patch.get_facecolor()[:3] for patch in fig.axes[0].patches}
    assert fills == {to_rgb(COLORS[kind]) for kind in kinds}
    behind = {kind for kind in kinds if kind in SHARDING}  # below the work: also told by the place
    for one, other in [
        *itertools.combinations({COLORS[kind] for kind in kinds - behind}, 2),
        *itertools.combinations({COLORS[kind] for kind in behind}, 2),
    ]:
        assert abs(lightness(one) - lightness(other)) > 9


def test_a_forward_is_much_lighter_than_a_backward():
    assert lightness(COLORS["F"]) - max(lightness(COLORS[kind]) for kind in "BI") > 18


@pytest.mark.parametrize("page", [page for page, _ in _contrast.PAGES])
def test_a_box_stands_out_of_the_page(page):
    for color in COLORS.values():
        assert contrast(color, page) > 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_number_in_a_box_can_be_read_on_both_pages(name):
    _, fig = drawn(name)
    [ax] = fig.axes
    assert ax.texts
    for text in ax.texts:
        x, y = text.get_position()
        inside = [patch for patch in ax.patches if patch.get_bbox().contains(x, y)]
        assert len(inside) == 1
        *color, opacity = inside[0].get_facecolor()
        assert readability(text.get_color(), color, opacity) > 4.5


def test_the_ink_of_a_page_is_that_pages():
    """It is dark on the one and light on the other, which no fixed colour is."""
    assert text_on("#ffffff") not in ("white", _figure.INK) and text_on("#000000") == "white"
    for color in COLORS.values():
        assert text_on(color, 0.25) == _figure.INK
        assert min(readability(fixed, color, 0.25) for fixed in ("white", _contrast.DARK)) < 3
    assert contrast("white", "black") == pytest.approx(21)
