import math
import random
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config

from naranhi import data, models

lists_of_tokens = st.lists(st.lists(st.integers(0, 49), min_size=2, max_size=16), min_size=1)


# --- batches -------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(2, 99), max_size=200),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_each_passage_is_in_exactly_one_batch(lengths, size, window, seed):
    for batches in (
        data.by_length(lengths, size, random.Random(seed), window=window),
        data.at_random(lengths, size, random.Random(seed)),
    ):
        assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
        assert len(batches) == math.ceil(len(lengths) / size)
        assert sum(len(batch) < size for batch in batches) <= 1


@given(lists_of_tokens, st.integers(1, 6), st.integers(0, 9), st.integers(1, 8))
def test_a_stream_has_each_passage_once_in_each_epoch(passages, size, seed, multiple):
    steps = math.ceil(len(passages) / size)
    batches = list(
        islice(data.stream(passages, size, seed=seed, pad=7, multiple=multiple), 2 * steps)
    )
    for epoch in (batches[:steps], batches[steps:]):
        rows = [
            row[seen.bool()].tolist()
            for tokens, mask, _ in epoch
            for row, seen in zip(tokens, mask, strict=True)
        ]
        empty = steps * size - len(passages)
        assert sorted(rows) == sorted(passages + empty * [[7]])
        assert all(len(batch.tokens) == size for batch in epoch)
        assert sum(batch.count for batch in epoch) == sum(len(one) - 1 for one in passages)


@pytest.mark.parametrize("batching", [data.by_length, data.at_random])
def test_a_stream_goes_on_where_another_has_stopped(batching):
    """In the middle of an epoch, at its end, and after several."""
    passages = [[token] * (token + 2) for token in range(13)]
    whole = list(islice(data.stream(passages, 3, seed=5, batching=batching), 20))
    for start in 0, 1, 4, 5, 11:
        rest = islice(data.stream(passages, 3, seed=5, batching=batching, start=start), 9)
        for batch, expected in zip(rest, whole[start : start + 9], strict=True):
            assert all(map(torch.equal, batch, expected))


def test_a_stream_of_nothing_or_from_before_its_beginning_is_refused():
    with pytest.raises(ValueError, match="no sequences"):
        next(data.stream([], 4))
    with pytest.raises(ValueError, match="number of batches to leave out, not -1"):
        next(data.stream([[1, 2]], 4, start=-1))


@pytest.mark.parametrize("size", [0, -1])
def test_batches_of_no_sequence_are_refused(size):
    words = f"size is a number of sequences, at least 1, not {size}"
    for batching in (data.by_length, data.at_random):
        with pytest.raises(ValueError, match=words):
            batching([2, 2], size, random.Random(0))
    with pytest.raises(ValueError, match=words):
        next(data.stream([[1, 2]], size, batching=lambda *_: [[0]]))


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_no_batch_is_refused(window):
    with pytest.raises(
        ValueError, match=f"window is a number of batches, at least 1, not {window}"
    ):
        data.by_length([2, 2], 1, random.Random(0), window=window)


def test_an_epoch_without_a_batch_is_refused():
    """A stream would look for one for ever."""
    epochs = iter([[[0]], []])
    batches = data.stream([[1, 2]], 1, batching=lambda *_: next(epochs))
    next(batches)
    with pytest.raises(ValueError, match="batching made no batch of 1 sequences"):
        next(batches)


def test_another_order_in_each_epoch_and_for_each_seed():
    passages = [[number, number] for number in range(40)]
    first, second = (
        [batch.tokens[:, 0].tolist() for batch in islice(data.stream(passages, 4, seed=seed), 20)]
        for seed in (0, 1)
    )
    again = [batch.tokens[:, 0].tolist() for batch in islice(data.stream(passages, 4, seed=0), 20)]
    assert first == again
    assert first[:10] != first[10:]
    assert first != second


@given(lists_of_tokens, st.integers(0, 3), st.integers(1, 8))
def test_what_a_batch_says_of_each_token(passages, empty, multiple):
    batch = data.collate(passages, len(passages) + empty, 49, multiple)
    longest = max(map(len, passages))
    assert batch.tokens.shape == batch.mask.shape == batch.targets.shape
    assert longest <= batch.tokens.shape[1] < longest + multiple
    assert batch.tokens.shape[1] % multiple == 0
    for row, passage in enumerate([*passages, *[[49]] * empty]):
        rest = batch.tokens.shape[1] - len(passage)
        assert batch.tokens[row].tolist() == passage + [49] * rest
        assert batch.mask[row].tolist() == [1] * len(passage) + [0] * rest
        assert batch.targets[row].tolist() == passage[1:] + [-100] * (rest + 1)
    assert batch.count == sum(len(passage) - 1 for passage in passages)
    assert batch.padding == batch.mask.numel() - sum(map(len, passages)) - empty


@given(st.lists(st.integers(2, 99), min_size=1), st.integers(1, 9), st.integers(1, 8))
def test_padding_is_what_the_batches_have(lengths, size, multiple):
    batches = data.at_random(lengths, size, random.Random(0))
    counted = [
        data.collate([[0] * lengths[place] for place in batch], multiple=multiple).padding
        for batch in batches
    ]
    assert data.padding(lengths, batches, multiple=multiple) == sum(counted)
    assert data.padding(lengths, batches, 128) == 128 * len(lengths) - sum(lengths)


def test_like_lengths_together_leave_little_to_pad():
    order = random.Random(0)
    lengths = [order.randint(20, 128) for _ in range(2000)]
    smart = data.padding(lengths, data.by_length(lengths, 8, random.Random(1)))
    plain = data.padding(lengths, data.at_random(lengths, 8, random.Random(1)))
    assert smart < plain / 10
    assert plain < data.padding(lengths, data.at_random(lengths, 8, random.Random(1)), 128)


# --- the loss ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    return nn.Sequential(*models.gpt2(config, dropout=0.0))


def gradients(model, loss):
    return torch.autograd.grad(loss, list(dict.fromkeys(model.parameters())))


@pytest.mark.slow
@settings(max_examples=25)
@given(
    passages=lists_of_tokens.filter(lambda some: len(some) < 6),
    empty=st.integers(0, 2),
    pad=st.integers(0, 49),
    multiple=st.sampled_from([1, 4]),
)
def test_the_loss_of_a_padded_batch_is_that_of_its_passages(model, passages, empty, pad, multiple):
    """With the mask or without it: on the right, padding changes no real token's logits."""
    alone = sum(
        F.cross_entropy(model(torch.tensor([one]))[0, :-1], torch.tensor(one[1:]), reduction="sum")
        for one in passages
    )
    batch = data.collate(passages, len(passages) + empty, pad, multiple)
    expected = gradients(model, alone / batch.count)
    for inputs in (batch.inputs, batch.tokens):
        loss = models.loss(model(inputs), batch.targets)
        torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-5)
        for one, other in zip(gradients(model, loss / batch.count), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_mean_over_a_step_is_not_the_mean_of_its_micro_batches_means(model):
    passages = [[1, 2], [3, 4], list(range(16)), list(range(16, 32))]
    batch = data.collate(passages)
    sums, counts = [], []
    for rows in (slice(0, 2), slice(2, 4)):
        part = data.Batch(*(tensor[rows] for tensor in batch))
        sums.append(models.loss(model(part.inputs), part.targets))
        counts.append(part.count)
    whole = models.loss(model(batch.inputs), batch.targets) / batch.count
    torch.testing.assert_close(sum(sums) / batch.count, whole)
    of_means = sum(one / count for one, count in zip(sums, counts, strict=True)) / 2
    assert abs(of_means - whole) > 0.01


def test_rows_without_targets_give_no_loss_and_no_gradient(model):
    batch = data.collate([[5]], rows=3)
    loss = models.loss(model(batch.inputs), batch.targets)
    assert (loss.item(), batch.count) == (0.0, 0)
    assert all(one.count_nonzero() == 0 for one in gradients(model, loss))


def test_a_batch_of_nothing_or_with_too_few_rows_is_refused():
    with pytest.raises(ValueError, match="there are no sequences to make a batch of"):
        data.collate([])
    with pytest.raises(ValueError, match="rows = 1 are too few for 2 sequences"):
        data.collate([[1, 2], [3, 4]], rows=1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=50))
def test_unigram_entropy_is_the_loss_of_whoever_knows_the_frequencies(targets):
    frequencies = torch.bincount(torch.tensor(targets), minlength=4) / len(targets)
    logits = frequencies.log().expand(1, len(targets), 4)
    best = models.loss(logits, torch.tensor([targets])) / len(targets)
    assert data.unigram_entropy([[0, *targets]]) == pytest.approx(best.item(), abs=1e-5)


def test_the_entropy_of_equal_frequencies():
    assert data.unigram_entropy([[9, 1, 2], [9, 3, 4]]) == pytest.approx(math.log(4))
    assert data.unigram_entropy([[9, 1, 1, 1]]) == 0
