"""A rank's chunks are told apart in the drawing of a timeline."""

from matplotlib.colors import to_rgb

from naranhi import schedules
from naranhi.show import _colors, _contrast, _figure, _timeline


def boxes(chunks):
    """For each rank the (chunk, opacity, colour) of its boxes; and the figure."""
    line = schedules.simulate(schedules.interleaved(2, 2, chunks))
    fig = _timeline.draw_timeline(line)
    actions = [action for row in line for action, _, _ in row]
    patches = fig.axes[0].patches
    assert len(patches) == len(actions)
    return [
        (
            action.stage // 2,
            round(patch.get_facecolor()[3], 3),
            patch.get_facecolor()[:3],
            action.kind,
        )
        for action, patch in zip(actions, patches, strict=True)
    ], fig


def test_each_chunk_has_its_own_opacity_and_every_kind_its_colour():
    for chunks, opacities in (
        (1, [1]),
        (2, [1, 0.25]),
        (3, [1, 0.6, 0.25]),
        (4, [1, 0.6, 0.425, 0.25]),
    ):
        found, _ = boxes(chunks)
        assert {(chunk, opacity) for chunk, opacity, _, _ in found} == set(enumerate(opacities))
        assert {(kind, color) for _, _, color, kind in found} == {
            (kind, to_rgb(_colors.KINDS[kind][1])) for kind in "FB"
        }


def test_the_key_names_chunks_where_there_are_several():
    keys = [
        [text.get_text() for text in boxes(chunks)[1].axes[0].get_legend().get_texts()]
        for chunks in (1, 2, 4)
    ]
    assert keys == [
        ["forward", "backward"],
        ["forward", "backward", "chunk 0", "chunk 1"],
        ["forward", "backward", "chunk 0", "chunk 1", "chunk 2", "chunk 3"],
    ]


def test_a_pale_box_has_a_frame_and_a_number_in_the_pages_ink():
    _, fig = boxes(2)
    svg = _figure.svg(fig, "two chunks")
    assert "fill-opacity:0.25" in svg
    assert "#010203" not in svg and "#040506" not in svg  # the page's colours, not their names
    colors = {text.get_color() for text in fig.axes[0].texts}
    assert colors == {_contrast.text_on(_colors.KINDS[kind][1]) for kind in "FB"} | {_figure.INK}
    widths = {patch.get_facecolor()[3]: patch.get_linewidth() for patch in fig.axes[0].patches}
    assert widths[1] == 0 and widths[0.25] > 0


def test_the_key_is_as_wide_as_the_picture_at_most():
    """Three kinds and four chunks, or four kinds and two, are the most there is to name."""
    rows = [[schedules.Action(stage, kind, 0) for stage in range(4) for kind in "FIW"]]
    alone = schedules.Timeline(
        [[schedules.Span(action, n, n + 1) for n, action in enumerate(rows[0])]]
    )
    for line in (alone, schedules.simulate(schedules.dualpipe_v(2, 4))):
        fig = _timeline.draw_timeline(line)
        fig.draw_without_rendering()
        key = fig.axes[0].get_legend().get_window_extent()
        assert key.x0 >= 0 and key.x1 <= fig.bbox.x1 and key.y1 <= fig.bbox.y1


def test_the_two_of_a_pair_share_their_row():
    """The forward above, the backward below; together as high as any other box."""
    line = schedules.simulate(schedules.dualpipe_v(2, 4), overlapped=2)
    patches = iter(_timeline.draw_timeline(line).axes[0].patches)
    high, pairs = set(), 0
    for rank, units in enumerate(schedules.dualpipe_v(2, 4).units):
        for unit in units:
            boxes = [next(patches) for _ in unit]
            tops = [box.get_y() - rank for box in boxes]
            bottoms = [top + box.get_height() for top, box in zip(tops, boxes, strict=True)]
            assert len({(box.get_x(), box.get_width()) for box in boxes}) == 1
            assert tops == sorted(tops) and all(map(float.__le__, bottoms, tops[1:]))
            high.add((round(tops[0], 3), round(bottoms[-1], 3)))
            pairs += len(unit) == 2
    assert len(high) == 1 and pairs == 6
