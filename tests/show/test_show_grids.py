"""Matrices side by side: every number is written, and every mark has its colour."""

import pytest
import torch
from matplotlib.colors import to_hex

from naranhi import show
from naranhi.show import _figure, _grids


@pytest.fixture
def shown(monkeypatch):
    """What was displayed: (data by MIME type, metadata), in order."""
    outputs = []
    monkeypatch.setattr(
        _figure, "display", lambda data, raw, metadata=None: outputs.append((data, metadata))
    )
    return outputs


def drawn(matrices):
    fig = _grids.draw_grids(matrices)
    (ax,) = fig.axes
    return [text.get_text() for text in ax.texts], ax.patches


def test_numbers_and_titles_are_written_as_one_would_by_hand():
    x = torch.tensor([[0.8, 1.2], [0.0, -3.0]])
    words, _ = drawn({"x": (x, [[-1, -1], [-1, -1]]), "y": ([[7]], [[0]])})
    assert words == ["x", "0.8", "1.2", "0", "-3", "y", "7"]


def test_marked_cells_have_their_colour_and_the_others_none():
    _, patches = drawn({"x": ([[1, 2, 3]], torch.tensor([[2, -1, 0]]))})
    filled = {
        patch.get_x(): to_hex(patch.get_facecolor())
        for patch in patches
        if patch.get_facecolor()[3]
    }
    assert filled == {_grids.PAD: show.COLORS[2], _grids.PAD + 2: show.COLORS[0]}
    assert len(patches) == 3 + 2  # a frame for each cell, and the two fillings


def test_matrices_stand_side_by_side_and_do_not_touch():
    _, patches = drawn({"a": ([[1, 2], [3, 4]], [[-1] * 2] * 2), "b": ([[5]], [[-1]])})
    first, second = patches[:4], patches[4:]
    assert max(p.get_x() + p.get_width() for p in first) < min(p.get_x() for p in second)
    assert {p.get_y() for p in first} == {_grids.TOP, _grids.TOP + 1}


def test_it_is_shown_as_a_figure_with_its_alt(shown):
    show.grids({"x": ([[1]], [[-1]])}, "A single cell.")
    ((data, metadata),) = shown
    assert 'aria-label="A single cell."' in data["text/html"]
    assert metadata is None
    with pytest.raises(ValueError, match="alt"):
        show.grids({"x": ([[1]], [[-1]])}, " ")


@pytest.mark.parametrize(
    ("matrices", "why"),
    [
        ({}, "at least one"),
        ({"x": ([[1, 2]], [[0]])}, "x: values and marks"),
        ({"x": ([], [])}, "x: there are no values"),
        ({"x": (torch.arange(2), torch.arange(2))}, "rows of elements, not tensor"),
        ({"x": ([[1, 2]], [[0, 4]])}, "x: a mark is one of 4 colours, from 0, not 4"),
    ],
)
def test_what_cannot_be_drawn_is_refused(matrices, why):
    with pytest.raises(ValueError, match=why):
        show.grids(matrices, "A picture.")
