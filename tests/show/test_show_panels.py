"""Panels of bars: rows fit, numbers stand where they belong, and what cannot be is named."""

import numpy as np
import pytest
import torch

from naranhi import show

ROWS = ["one", "two", "three"]


def drawn(predicted=(1, 0, 3), measured=(1.5, 0.5, 3), write=None):
    size = predicted, None, None
    return show.panels(ROWS, {"time": (predicted, measured, write), "size": size})


def test_a_bar_for_each_prediction_and_a_point_for_each_measurement():
    time, size = drawn().axes
    assert [bar.get_width() for bar in time.patches] == [1, 0, 3]
    (points,) = time.lines
    assert list(points.get_xdata()) == [1.5, 0.5, 3] and list(points.get_ydata()) == [0, 1, 2]
    assert not size.lines
    assert [text.get_text() for text in time.get_yticklabels()] == ROWS
    assert time.get_title("left") == "time" and size.get_title("left") == "size"
    assert time.get_ylim()[0] > time.get_ylim()[1]  # the first row on top


def test_numbers_stand_right_of_bar_and_point():
    time = drawn(write="{:.0%}".format).axes[0]
    assert [text.get_text() for text in time.texts] == ["100%", "0%", "300%"]
    assert [text.xy for text in time.texts] == [(1.5, 0), (0.5, 1), (3, 2)]


@pytest.mark.parametrize(
    "options, named",
    [
        ({"predicted": (1, 2)}, "time: 2 numbers for 3 rows"),
        ({"measured": (1, 2)}, "time: 2 numbers for 3 rows"),
        ({"predicted": (1, -2, 3)}, "time: bars are drawn from zero"),
        ({"measured": (1, float("nan"), 3)}, "time: bars are drawn from zero"),
    ],
)
def test_what_no_bar_can_show_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        drawn(**options)


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_arrays_are_taken_as_lists_are(array):
    axes = drawn(array([1.0, 0.0, 3.0]), array([1.5, 0.5, 3.0])).axes
    assert [bar.get_width() for bar in axes[0].patches] == [1, 0, 3]
    assert [text.get_text() for text in axes[0].texts] == ["1", "0", "3"]


def test_panels_of_nothing_are_refused():
    for labels, measures in ([], {"time": ([], None, None)}), (ROWS, {}):
        with pytest.raises(ValueError, match="at least one row and one measure"):
            show.panels(labels, measures)


def test_there_may_be_more_panels_than_colours():
    measures = {f"measure {k}": ((k, k, k), None, None) for k in range(1, 7)}
    axes = show.panels(ROWS, measures).axes
    assert [ax.patches[0].get_width() for ax in axes] == [1, 2, 3, 4, 5, 6]
