"""What attention over a cut sequence refuses: on every rank alike, and before anything is sent."""

import re

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from sent import messages

from naranhi.context_parallel import (
    gathered_attention,
    positions,
    ring_attention,
    split_sequence,
    ulysses_attention,
)


def tensors(heads=4, length=6, size=4, kv_heads=None, **options):
    kv_heads = kv_heads or heads
    return [torch.zeros(2, count, length, size, **options) for count in (heads, kv_heads, kv_heads)]


def only_rank_1(other, usual):
    return other if dist.get_rank() == 1 else usual


def of_plain_order():
    return {"order": "head_tail", "positions": positions(12, first_ranks(2))}


REFUSED = {  # what is passed, and the message
    "lengths": (
        lambda: (tensors(length=only_rank_1(8, 6)), {}),
        "query: (2, 4, 6, 4) of torch.float32 on cpu on rank 0, (2, 4, 8, 4) of torch.float32",
    ),
    "key-value heads": (
        lambda: (tensors(kv_heads=only_rank_1(2, 4)), {}),
        "key and value: (2, 4, 6, 4) of torch.float32 on cpu on rank 0, (2, 2, 6, 4) of",
    ),
    "dtypes": (
        lambda: (tensors(dtype=only_rank_1(torch.float64, torch.float32)), {}),
        "query: (2, 4, 6, 4) of torch.float32 on cpu on rank 0, (2, 4, 6, 4) of torch.float64",
    ),
    "scale": (lambda: (tensors(), {"scale": -0.5}), "scale must be a positive number, not -0.5"),
    "scale that is no number": (lambda: (tensors(), {"scale": float("nan")}), "scale must be"),
    "masks": (
        lambda: (tensors(), {"causal": only_rank_1(False, True)}),
        "causal: True on rank 0, False on rank 1",
    ),
    "orders": (
        lambda: (tensors(), {"order": only_rank_1("head_tail", "plain")}),
        "order: plain on rank 0, head_tail on rank 1",
    ),
    "documents": (
        lambda: (tensors(), {"documents": only_rank_1([4, 8], [8, 4])}),
        "documents: [8, 4] on rank 0, [4, 8] on rank 1",
    ),
    "scales": (
        lambda: (tensors(), {"scale": only_rank_1(0.1, None)}),
        "scale: None on rank 0, 0.1 on rank 1",
    ),
    "a gradient that one rank needs": (
        lambda: (tensors(requires_grad=only_rank_1(True, False)), {}),
        "gradients: False on rank 0, True on rank 1",
    ),
    "one rank's error": (
        lambda: (tensors(size=only_rank_1(0, 4)), {}),
        "on rank 1: query and key must have elements, not shapes (2, 4, 6, 0) and (2, 4, 6, 0)",
    ),
    "no order": (
        lambda: (tensors(), {"order": "zigzag"}),
        "order must be one of ('plain', 'head_tail'), not 'zigzag'",
    ),
    "odd length": (
        lambda: (tensors(length=5), {"order": "head_tail"}),
        "head_tail order halves each rank's part, so its length must be even, not 5",
    ),
    "positions of another order": (
        lambda: (tensors(), of_plain_order()),
        "on rank 0: the positions are not those of 'head_tail' order on this rank, which are "
        "0 to 2, 9 to 11\non rank 1: the positions are not those of 'head_tail' order on this "
        "rank, which are 3 to 5, 6 to 8",
    ),
    "too short documents": (
        lambda: (tensors(), {"documents": [4, 4]}),
        "document lengths must be at least 1 and sum to 12, the sequence's, not [4, 4]",
    ),
    "documents as a tensor": (
        lambda: (tensors(), {"documents": torch.tensor([5, 7])}),
        "documents must be a list of lengths (whole numbers, not a tensor), such as [5, 3], or "
        "one such list for each row, not tensor([5, 7])",
    ),
    "documents that are no whole numbers": (
        lambda: (tensors(), {"documents": [5.0, 7.0]}),
        "one such list for each row, not [5.0, 7.0]",
    ),
    "a length for documents": (lambda: (tensors(), {"documents": 12}), "for each row, not 12"),
    "positions that are no tensor, on one rank": (
        lambda: (tensors(), {"positions": only_rank_1([6, 7, 8, 9, 10, 11], None)}),
        "on rank 1: positions must be a tensor, not <class 'list'>",
    ),
    "no query on one rank": (
        lambda: ([only_rank_1(None, tensors()[0]), *tensors()[1:]], {}),
        "on rank 1: query must be a tensor of shape (batch, heads, sequence, head size), not "
        "<class 'NoneType'>",
    ),
    "heads over key-value heads": (
        lambda: (tensors(heads=4, kv_heads=3), {}),
        "3 key-value heads do not divide 4 heads",
    ),
    "whole numbers": (
        lambda: (tensors(dtype=torch.int64), {}),
        "attention is for floating point, not torch.int64",
    ),
    "three dimensions": (
        lambda: ([x[0] for x in tensors()], {}),
        "query must be a tensor of shape (batch, heads, sequence, head size), not (4, 6, 4)",
    ),
    "key and value": (
        lambda: ([*tensors()[:2], tensors(length=4)[2]], {}),
        "value must have shape (2, 4, 6, 4), not (2, 4, 4, 4)",
    ),
    "one dtype": (
        lambda: ([tensors(dtype=torch.float64)[0], *tensors()[1:]], {}),
        "key must have dtype torch.float64, not torch.float32",
    ),
}


def message(attend, make):
    """The error, and how many messages were sent."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    args, options = make()
    with messages() as sent, pytest.raises(ValueError) as error:
        attend(*args, group, **options)
    return str(error.value), len(sent)


def refusals():
    return {
        (attend.__name__, what): message(attend, make)
        for attend in (ring_attention, gathered_attention, ulysses_attention)
        for what, (make, _) in REFUSED.items()
    }


def test_what_is_refused_is_refused_by_all_ranks_before_anything_is_sent(five):
    first, second = five.call(refusals)[:2]
    assert first == second
    # 3 key-value heads do not divide 4 heads: what Ulysses says, too, though 2 ranks divide neither
    for (way, what), (text, sent) in first.items():
        assert REFUSED[what][1] in text, (way, what, text)
        assert sent == 0


def test_without_a_comparison_each_rank_refuses_its_own_errors(five):
    for text in five.call(unchecked)[:2]:
        assert text == "attention is for floating point, not torch.int64"


def unchecked():
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    with pytest.raises(TypeError) as error:
        ring_attention(*tensors(dtype=torch.int64), group, check=False)
    return str(error.value)


def ulysses():
    return message(ulysses_attention, lambda: (tensors(heads=6, kv_heads=3), {}))


def test_ulysses_ends_at_the_key_value_heads(five):
    for text, sent in five.call(ulysses)[:2]:
        assert text == (
            "2 ranks do not divide 3 key-value heads (of 6 heads): take ring_attention or "
            "gathered_attention, or fewer ranks"
        )
        assert sent == 0


def splits():
    group, found = first_ranks(2), []
    if dist.get_rank() >= 2:
        return None
    for length, order in ((7, "plain"), (6, "head_tail"), (8, "zigzag")):
        for function in (
            lambda length, group, order: split_sequence(torch.zeros(length), group, order=order),
            lambda length, group, order: positions(length, group, order=order),
        ):
            with pytest.raises(ValueError) as error:
                function(length, group, order)
            found.append(str(error.value))
    return found


def test_sequences_that_ranks_do_not_divide(five):
    for found in five.call(splits)[:2]:
        for text, pattern in zip(
            found[::2],
            ["2 ranks do not divide a sequence of 7: pad it", "be even, not 3", "not 'zigzag'"],
            strict=True,
        ):
            assert re.search(pattern, text)
        assert found[::2] == found[1::2]


def nan():
    """The ranks whose output has a NaN: those whose queries see it."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    query, key, value = tensors(length=4)
    if rank == 1:
        value[:, :, 0] = torch.nan
    output = ring_attention(query, key, value, group)
    assert output.isnan().any(-1)[0, 0].tolist() == [rank == 1] * 4
    return True


def test_a_nan_is_seen_where_the_mask_lets_it(five):
    assert five.call(nan)[:2] == [True, True]
