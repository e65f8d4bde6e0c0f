"""Any shard of any tensor as boxes: together they are the tensor, and faults are seen."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from naranhi.checkpoint.boxes import Box, boxes_of_run, tiling_fault, views_of_run, writers
from naranhi.tensor_parallel.shards import Split

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def put(whole, views):
    """Copy views into the whole, where nothing has been put yet."""
    for box, view in views.items():
        place = tuple(slice(o, o + s) for o, s in zip(*box, strict=True))
        assert whole[place].isnan().all() and list(whole[place].shape) == list(view.shape)
        whole[place] = view


@given(shapes, st.data())
def test_a_run_of_elements_is_few_boxes_in_order(shape, data):
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(0, prod(shape)))
    numbers = torch.arange(prod(shape)).view(shape)
    boxes = list(boxes_of_run(shape, start, stop))
    found = [
        numbers[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1)
        for box in boxes
    ]
    expected = list(range(start, stop))
    assert [int(n) for part in found for n in part] == expected
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(prod(box.sizes) for box in boxes)


@given(
    shapes.filter(len),
    st.integers(1, 4),
    st.sampled_from([1, 1, 3]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.data(),
)
def test_runs_of_shards_are_the_whole_tensor(shape, ranks, parts, replicas, align, data):
    """Over tensor-parallel ranks, with padding or parts; each shard in runs, as ZeRO has them."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    length = shape[dim] if parts == 1 else parts * ranks * shape[dim]
    split = Split(dim, length, ranks, parts)
    shape = (*shape[:dim], length, *shape[dim + 1 :])
    expected = torch.arange(float(prod(shape))).view(shape)
    whole, boxes = torch.full(shape, torch.nan), []
    for rank in range(ranks):
        shard = split.shard(expected, rank)
        size = -(-shard.numel() // (replicas * align)) * align
        for start in range(0, size * replicas, size):
            run = shard.reshape(-1)[start : start + size]
            views = views_of_run(run, shard.shape, start, split, rank)
            put(whole, views)
            boxes += views
            if len(run):
                memory = run.untyped_storage().data_ptr()
                assert all(v.untyped_storage().data_ptr() == memory for v in views.values())
    assert torch.equal(whole, expected)
    assert tiling_fault(shape, boxes) is None
    assert boxes == [] or "are on no rank" in tiling_fault(shape, boxes[1:])


@pytest.mark.parametrize(
    "boxes, fault",
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], None),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3)), ((2, 0), (2, 3))], None),  # a replica
        ([((0, 0), (2, 3))], "6 of 12 elements are on no rank"),
        ([((0, 0), (2, 3)), ((1, 0), (3, 3))], "the box at [0, 0] of [2, 3] and the box at [1, 0]"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], "overlap"),
        # As many elements as the tensor has, and yet not those:
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
        # The same offset, other sizes: of such two, DCP would write one and say nothing.
        ([((0, 0), (2, 3)), ((0, 0), (4, 3))], "overlap"),
        ([((0, 0), (4, 3)), ((3, 1), (1, 1))], "overlap"),
        ([((0, 0), (2, 3)), ((2, 0), (3, 3))], "[3, 3] does not lie in the tensor"),
        ([((-1, 0), (4, 3))], "does not lie in the tensor"),
    ],
)
def test_wrong_tilings_are_seen(boxes, fault):
    found = tiling_fault((4, 3), [Box(*box) for box in boxes])
    assert found is None if fault is None else fault in found


def test_scalars_and_empty_tensors():
    assert list(boxes_of_run((), 0, 1)) == [Box((), ())] and list(boxes_of_run((), 0, 0)) == []
    assert tiling_fault((), [Box((), ())]) is None
    assert tiling_fault((), []) == "1 of 1 elements are on no rank"
    assert tiling_fault((0, 3), []) is None


def test_replicas_share_the_writing():
    """Four equal boxes that all four ranks have: one each. What one rank has alone counts first."""
    boxes = {Box((i,), (10,)): [0, 1, 2, 3] for i in range(0, 40, 10)}
    chosen = writers({"a": {Box((0,), (100,)): [2]}, "b": boxes}, {"a": 4, "b": 4})
    assert chosen["a", Box((0,), (100,))] == 2
    assert sorted(rank for (name, _), rank in chosen.items() if name == "b") == [0, 0, 1, 3]
