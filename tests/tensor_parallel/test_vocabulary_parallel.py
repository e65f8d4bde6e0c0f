"""The vocabulary over ranks: embedding, head and cross-entropy beside torch's own."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.nn import functional as F

from naranhi.tensor_parallel import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    full_state_dict,
    gather_from_group,
    vocabulary_cross_entropy,
)
from naranhi.zero import Zero

IGNORE_INDEX = -100


def embedding(ranks, words):
    """Rows are copied, and added to zeros: equal to the bit, and so are the gradients."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return
    torch.manual_seed(0)
    whole = nn.Embedding(words, 6)
    split = VocabularyParallelEmbedding(whole, group)
    tokens, gradient = torch.randint(words, (3, 8)), torch.randint(-4, 5, (3, 8, 6)).float()
    y, z = whole(tokens), split(tokens)
    y.backward(gradient)
    z.backward(gradient)
    assert torch.equal(y, z)
    assert torch.equal(full_state_dict(split)["weight"], whole.weight)
    expected = F.pad(whole.weight.grad, (0, 0, 0, len(split.weight) * ranks - words))
    assert torch.equal(split.weight.grad, expected.chunk(ranks)[rank])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_embedding_is_exact(five, ranks):
    for words in (5, 12, 13):  # on 4 ranks, one has none of 5 words
        five.call(embedding, ranks, words)


def head_and_loss(ranks, words, bias, scale, dtype, shape):
    """How far the loss, relative to itself, and the gradients are from torch's."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    torch.manual_seed(0)
    whole = nn.Linear(6, words, bias).to(dtype)
    x = torch.randn(*shape, 6, dtype=dtype)
    targets = torch.randint(words, shape)
    targets.view(-1)[::3] = IGNORE_INDEX
    split = VocabularyParallelHead(whole, group)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    logits = whole(xs[0]) * scale
    loss = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    own = split(xs[1])
    assert own.shape[-1] == -(-words // ranks)
    together = gather_from_group(own, group)
    assert torch.equal(together[..., words:], torch.full_like(together[..., words:], -torch.inf))
    split_loss = vocabulary_cross_entropy(own * scale, targets, group)
    (loss / 7).backward()
    (split_loss / 7).backward()
    assert split_loss.isfinite()
    filling = split.weight.grad[max(0, words - rank * len(split.weight)) :]
    assert not filling.any()  # and no nan
    apart = [(split_loss - loss).abs() / (1 + loss.abs()), (xs[1].grad - xs[0].grad).abs().max()]
    for name, parameter in split.named_parameters():
        parameter.data = parameter.grad
        gradient = full_state_dict(split)[name]
        apart.append((gradient - getattr(whole, name).grad).abs().max())
    return max(one.item() for one in apart)


@pytest.mark.parametrize("words", [5, 12, 51])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_head_and_cross_entropy(five, ranks, words):
    for bias, shape in ((False, (2, 8)), (True, (5,))):
        apart = five.call(head_and_loss, ranks, words, bias, 1.0, torch.float32, shape)
        assert max(apart[:ranks]) <= 1e-6
        apart = five.call(head_and_loss, ranks, words, bias, 3.0, torch.float64, shape)
        assert max(apart[:ranks]) <= 1e-14


def large_logits():
    """Exponentials of what lies far from the largest, and half precision."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    torch.manual_seed(0)
    targets = torch.randint(8, (16,))
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(16, 8) * 1000).to(dtype)
        whole = logits.clone().requires_grad_()
        own = logits.chunk(2, -1)[rank].clone().requires_grad_()
        loss = F.cross_entropy(whole.float(), targets, reduction="sum")
        split = vocabulary_cross_entropy(own, targets, group)
        loss.backward()
        split.backward()
        assert split.dtype == torch.float32 and own.grad.dtype == dtype
        torch.testing.assert_close(split, loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(own.grad, whole.grad.chunk(2, -1)[rank], rtol=0, atol=1e-6)
    own = torch.randn(16, 4, requires_grad=True)
    nothing = vocabulary_cross_entropy(own, torch.full((16,), IGNORE_INDEX), group)
    nothing.backward()
    assert nothing == 0 and not own.grad.any()


def test_large_logits_half_precision_and_nothing_valid(five):
    five.call(large_logits)


def values_reduced(ranks, dtype):
    group = first_ranks(ranks)
    if dist.get_rank() >= ranks:
        return None
    targets, logits = torch.arange(6), torch.randn(6, 4, dtype=dtype)
    before = logits.clone()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        vocabulary_cross_entropy(logits, targets, group)
    assert torch.equal(logits, before), "the caller's"
    return [call.args[0].numel() for call in reduced.call_args_list]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_takes_two_messages_and_leaves_the_logits(five, dtype):
    """The largest logit; then the sum of exponentials, and the target's logit, in one."""
    assert five.call(values_reduced, 2, dtype)[:2] == [[6, 12], [6, 12]]


def converted(words):
    """How far logits are from a head's in fp32, where ZeRO has converted it to bf16."""
    group, rank = first_ranks(2), dist.get_rank()
    own = [dist.new_group([one]) for one in range(2)]
    if rank >= 2:
        return None
    torch.manual_seed(0)
    whole, x = nn.Linear(16, words, bias=False), torch.randn(3, 16)
    model = nn.Sequential(VocabularyParallelHead(copy.deepcopy(whole), group, gather_output=True))
    Zero(model, 1, precision="bf16", group=own[rank])
    return (model(x) - whole(x)).abs().max().item()


@pytest.mark.parametrize("words", [12, 13])
def test_a_head_that_is_padded_computes_in_bf16(five, words):
    assert 0 < max(five.call(converted, words)[:2]) < 0.05
