"""How a parameter is cut: without ranks."""

from itertools import product

import pytest
import torch

from naranhi.tensor_parallel.shards import Split


@pytest.mark.parametrize("ranks, parts, dim", list(product([1, 2, 3, 4], [1, 3], [0, 1])))
def test_join_undoes_shard(ranks, parts, dim):
    for size in (12 * parts, 24 * parts):
        whole = torch.randn(5, size) if dim else torch.randn(size, 5)
        split = Split(dim, size, ranks, parts)
        shards = [split.shard(whole, rank) for rank in range(ranks)]
        assert {one.shape[dim] for one in shards} == {size // ranks}
        assert torch.equal(split.join(shards), whole)


@pytest.mark.parametrize("size, ranks", list(product([1, 2, 5, 7, 8], [1, 2, 3, 4])))
def test_what_the_ranks_do_not_divide_is_filled_up_with_zeros_and_stripped(size, ranks):
    whole, split = torch.randn(size, 3), Split(0, size, ranks)
    shards = [split.shard(whole, rank) for rank in range(ranks)]
    assert {tuple(one.shape) for one in shards} == {(-(-size // ranks), 3)}
    padded = torch.cat(shards)
    assert torch.equal(padded[:size], whole) and not padded[size:].any()
    assert torch.equal(split.join(shards), whole)


def test_each_of_the_parts_is_cut_by_itself():
    whole = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33])
    split = Split(0, 12, 2, parts=3)
    assert split.shard(whole, 0).tolist() == [10, 11, 20, 21, 30, 31]
    assert split.shard(whole, 1).tolist() == [12, 13, 22, 23, 32, 33]


def test_a_shard_is_a_copy():
    whole = torch.zeros(4)
    Split(0, 4, 1).shard(whole, 0).fill_(1.0)
    assert not whole.any()
