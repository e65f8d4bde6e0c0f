"""Lanes: boxes stand where and as wide as they should; what cannot be drawn is named."""

import pytest

from naranhi import show
from naranhi.show._lanes import draw_lanes

ROWS = {
    "cores": [("compute", 0, 10.0, 12.0), ("compute", 1, 12.0, 14.0)],
    "link": [("communicate", None, 11.0, 16.0)],
}


def test_boxes_begin_with_the_first_and_may_overlap_in_time():
    ax = draw_lanes(ROWS).axes[0]
    boxes = [
        (box.get_x(), round(box.get_x() + box.get_width()), int(box.get_y())) for box in ax.patches
    ]
    assert boxes == [(0.0, 2, 0), (2.0, 4, 0), (1.0, 6, 1)]
    assert ax.get_xlim() == (0, 6.0)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["cores", "link"]
    assert [text.get_text() for text in ax.texts] == ["0", "1"]


def test_a_colour_for_each_kind_in_the_order_of_the_key():
    ax = draw_lanes(ROWS).axes[0]
    first, second, third = (box.get_facecolor() for box in ax.patches)
    assert first == second != third
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["compute", "communicate"]


def test_a_number_is_left_out_where_there_is_no_room():
    narrow = {"cores": [("compute", 1234, 0.0, 0.01), ("compute", 5, 1.0, 2.0)]}
    assert [text.get_text() for text in draw_lanes(narrow).axes[0].texts] == ["5"]


def test_two_drawings_can_share_an_end():
    assert draw_lanes(ROWS, end=20.0).axes[0].get_xlim() == (0, 20.0)


@pytest.mark.parametrize(
    "rows, end, named",
    [
        ({"cores": []}, None, "one to 4 kinds"),
        ({"cores": [(kind, None, 0, 1) for kind in "abcde"]}, None, "one to 4 kinds"),
        ({"cores": [("compute", 3, 2.0, 1.0)]}, None, "ends before it starts: .*'compute', 3"),
        ({"cores": [("compute", 3, float("nan"), 1.0)]}, None, "finite times: .*'compute', 3"),
        ({"cores": [("compute", 3, 0.0, float("inf"))]}, None, "finite times"),
        (ROWS, 5.0, "end = 5.0 is before the end of the last box, 6.0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(rows, end, named):
    with pytest.raises(ValueError, match=named):
        show.lanes(rows, "Lanes.", end=end)
