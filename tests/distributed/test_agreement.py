"""What several ranks have to agree on: values gathered, errors raised on all."""

import pytest
import torch
import torch.distributed as dist

from naranhi import distributed


class Refused(Exception):
    pass


def gathered():
    return distributed.from_all_ranks({"rank": dist.get_rank()})


def test_every_rank_has_the_values_of_all_by_rank(five):
    assert five.call(gathered) == [[{"rank": rank} for rank in range(5)]] * 5


def guarded(wrong):
    """What `raise_on_all` gives where the ranks of `wrong` raise, and how many ranks go on."""

    def function():
        if dist.get_rank() in wrong:
            raise wrong[dist.get_rank()]
        return dist.get_rank()

    try:
        found = distributed.raise_on_all(function, kind=Refused)
    except Refused as error:
        found = str(error)
    return found, sum(distributed.from_all_ranks(1))  # no rank has left the others


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({}, None),
        ({3: Refused("no")}, "on rank 3: no"),
        (
            {1: Refused("no"), 2: ValueError("not 7"), 4: Refused("no")},
            "on rank 1, 4: no\non rank 2: not 7",
        ),
        ({rank: OSError(28, "full") for rank in range(5)}, "[Errno 28] full"),
        ({0: KeyError("w")}, "on rank 0: KeyError: 'w'"),
        ({0: AssertionError()}, "on rank 0: AssertionError: "),
        ({2: ValueError(), 3: Refused()}, "on rank 2: ValueError: \non rank 3: Refused: "),
    ],
)
def test_an_error_on_any_rank_is_raised_on_all(five, wrong, message):
    expected = list(range(5)) if message is None else [message] * 5
    assert five.call(guarded, wrong) == [(one, 5) for one in expected]


def others_pass():
    def function():
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return "fine"

    try:
        return distributed.raise_on_all(function, errors=(ValueError,))
    except KeyboardInterrupt:
        distributed.from_all_ranks(None)
        return "interrupted"


def test_what_is_not_to_be_told_is_raised_where_it_is(five):
    assert five.call(others_pass) == ["fine", "interrupted", "fine", "fine", "fine"]


def disagreeing(members):
    """What `agree` says on each rank of a group of some ranks, the last of which differs."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    try:
        distributed.agree(group, size=int(dist.get_rank() == members[-1]))
    except ValueError as error:
        return str(error)


def test_ranks_of_a_group_are_named_as_in_the_world(five):
    message = "size: 0 on rank 1, 1 on rank 4"
    assert five.call(disagreeing, [1, 3, 4]) == [None, message, None, message, message]


def outside(members):
    """What a rank that is not in a group is told by each function, and whether its work was done"""
    group, done = dist.new_group(members), []
    if dist.get_rank() in members:
        return None
    said = []
    for function in (
        lambda: distributed.from_all_ranks(1, group),
        lambda: distributed.raise_on_all(lambda: done.append(1), group),
        lambda: distributed.agree(group, size=1),
    ):
        with pytest.raises(ValueError) as raised:
            function()
        said.append(str(raised.value))
    return said, done


def test_a_rank_outside_the_group_is_told_so(five):
    told = ["this rank is not a member of the group"] * 3, []
    assert five.call(outside, [0, 1]) == [None, None, told, told, told]


def nan_agreed():
    distributed.agree(x=float("nan"), several=[1, float("nan")])
    with pytest.raises(ValueError, match=r"x: nan on rank 0, 2\.0 on rank 1"):
        distributed.agree(x=float("nan") if dist.get_rank() == 0 else 2.0)
    return True


def test_nan_on_every_rank_is_equal(five):
    assert five.call(nan_agreed) == [True] * 5


def test_a_fingerprint_is_of_the_values_that_a_view_has():
    x = torch.tensor([1 + 2j, 3 - 1j])
    for view, values in ((x.conj(), x.conj().resolve_conj()), (x.conj().imag, -x.imag)):
        assert distributed.fingerprint(view) == distributed.fingerprint(values)
    for column in torch.ones(1, 3)[:, 1], torch.arange(6.0)[::6], torch.ones(0, 3)[:, 1]:
        assert distributed.fingerprint(column) == distributed.fingerprint(column.clone())
    assert distributed.fingerprint(x.conj()) != distributed.fingerprint(x)
