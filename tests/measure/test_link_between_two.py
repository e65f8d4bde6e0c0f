"""The link between two ranks, measured on real ranks."""

import pytest
import torch.distributed as dist

from naranhi import measure

SIZES = [1, 2**20, 2**24]


def link(ranks):
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        return measure.link_seconds(SIZES, group=group, repeats=5)


def test_all_ranks_of_a_group_learn_the_same_of_its_first_two(five):
    results = five.call(link, [4, 1, 2])
    assert results[0] is results[3] is None
    assert results[1] == results[2] == results[4]
    assert list(results[1]) == SIZES
    assert 0 < results[1][1] < results[1][2**24]


def refusals():
    alone = [dist.new_group([rank]) for rank in range(5)][dist.get_rank()]
    said = []
    for sizes, group in ([1], alone), ([2**20, 0], None):
        with pytest.raises(ValueError) as refused:
            measure.link_seconds(sizes, group=group)
        said.append(str(refused.value))
    return said


def test_a_link_has_two_ends_and_a_message_at_least_one_byte(five):
    expected = [
        "measuring a link needs 2 ranks or more, and this group has 1",
        "sizes must be at least 1 byte, not 0",
    ]
    assert five.call(refusals) == [expected] * 5
