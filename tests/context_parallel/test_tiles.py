"""Which queries see which keys: the tiles of a mask, and the parts of a sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from naranhi import costs
from naranhi.context_parallel import ORDERS
from naranhi.context_parallel.order import Run, by_rank, in_sequence, runs
from naranhi.context_parallel.tiles import Tile, spans, tiles

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def places(parts):
    """The position of each index."""
    return torch.tensor([start + i for start, length, _ in parts for i in range(length)])


@given(lengths, st.integers(1, 5), st.sampled_from(ORDERS), st.booleans(), st.data())
def test_tiles_cover_what_the_mask_leaves_once(counts, ranks, order, causal, data):
    counts[-1] += -sum(counts) % (2 * ranks)
    length = sum(counts)
    own, other = (
        runs(order, ranks, data.draw(st.integers(0, ranks - 1)), length // ranks) for _ in "qk"
    )
    start = data.draw(st.integers(0, length - 1))
    some = Run(start, data.draw(st.integers(1, length - start)), 0)
    other = data.draw(st.sampled_from([other, [Run(0, length, 0)], [some]]))
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    q, k = places(own), places(other)
    expected = ids[q][:, None] == ids[k][None]
    if causal:
        expected &= q[:, None] >= k[None]
    seen = torch.zeros(len(q), len(k), dtype=torch.int)
    for rows, queries, keys, triangle in tiles(own, other, causal, spans(counts, 1, length)):
        assert rows == slice(None)
        part = seen[queries, keys]
        assert not triangle or part.shape[0] == part.shape[1]
        part += torch.ones_like(part).tril() if triangle else 1
    assert torch.equal(seen, expected.int())


def test_each_step_of_a_ring_in_head_and_tail_order_is_one_rectangle():
    """And each rank computes the same: half a block, in every step."""
    ranks, length = 4, 8
    masks = spans(None, 1, ranks * length)
    for rank in range(ranks):
        own = runs("head_tail", ranks, rank, length)
        for other in range(ranks):
            found = tiles(own, runs("head_tail", ranks, other, length), True, masks)
            if other < rank:
                assert found == [Tile(slice(None), slice(0, 8), slice(0, 4), False)]
            if other > rank:
                assert found == [Tile(slice(None), slice(4, 8), slice(0, 8), False)]


def area(tile):
    height, width = (part.stop - part.start for part in tile[1:3])
    return height * width / (2 if tile.causal else 1)


@pytest.mark.parametrize("order", ORDERS)
def test_the_idle_share_is_that_of_the_tiles(order):
    for ranks in (1, 2, 3, 8):
        length = 4
        masks = spans(None, 1, ranks * length)
        work = [
            sum(
                area(tile)
                for other in range(ranks)
                for tile in tiles(
                    runs(order, ranks, rank, length),
                    runs(order, ranks, other, length),
                    True,
                    masks,
                )
            )
            for rank in range(ranks)
        ]
        idle = 1 - sum(work) / (ranks * max(work))
        assert costs.context_idle(ranks, order) == pytest.approx(idle, abs=1e-12)


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(ORDERS))
def test_parts_make_the_sequence_again(ranks, half, order):
    whole = torch.randn(2, 2 * half * ranks, 3)
    parts = by_rank(whole, ranks, order, 1)
    assert torch.equal(in_sequence(list(parts), order, 1), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[:, places(runs(order, ranks, rank, 2 * half))])


def test_documents_make_the_sequence():
    assert spans(None, 3, 10) == [(slice(None), [(0, 10)])]
    assert spans([4, 6], 3, 10) == [(slice(None), [(0, 4), (4, 10)])]
    assert spans([[10], [1, 9]], 2, 10) == [
        (slice(0, 1), [(0, 10)]),
        (slice(1, 2), [(0, 1), (1, 10)]),
    ]
    for wrong in ([4, 5], [[10], [4, 5]], [11, -1], [0, 10]):
        with pytest.raises(ValueError, match="must be at least 1 and sum to 10"):
            spans(wrong, 2, 10)
    with pytest.raises(ValueError, match="documents of 3 rows for a batch of 2"):
        spans([[10]] * 3, 2, 10)
    with pytest.raises(ValueError, match="must be at least 1 and sum to 10"):
        spans([], 2, 10)
