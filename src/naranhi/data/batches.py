"""From passages to batches: shuffled, of similar length, padded no further than needed.

A token is predicted from the tokens before it, so a passage of n tokens has n - 1 targets. Where
there is nothing to predict the target is -100, which the loss ignores. Padding never affects
results, whatever token it consists of, except in a mixture of experts, whose routers process it
like other tokens. `count` is the number of valid targets, by which the summed loss is divided.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch

from naranhi.models import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Batch(NamedTuple):
    """Rows of tokens, padded on the right to one length.

    Attributes:
        tokens: (rows, length), int64.
        mask: (rows, length), int64: 1 for a token, 0 for padding.
        targets: (rows, length), int64: the token that follows, or -100.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of GPT-2's embedding."""
        return self.tokens, self.mask

    @property
    def count(self) -> int:
        """The number of valid targets, by which the summed loss of the step is divided."""
        return int((self.targets != IGNORE_INDEX).sum())

    @property
    def padding(self) -> int:
        """The number of padding tokens."""
        return int((self.mask == 0).sum())

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on this device."""
        return Batch(*(tensor.to(device) for tensor in self))


def encode(
    tokenizer: PreTrainedTokenizerBase, passages: Iterable[str], length: int
) -> list[list[int]]:
    """Return each passage as a list of token ids, cut to at most `length` tokens.

    A passage of one token has nothing to predict and is left out.

    Raises:
        ValueError: if there are no passages, none is left, or `length` is below 2.
    """
    passages = list(passages)
    if length < 2:
        raise ValueError(f"length = {length} leaves nothing to predict; give 2 tokens or more")
    if not passages:
        raise ValueError("there are no passages: there is nothing to learn")
    sequences = tokenizer(passages, truncation=True, max_length=length)["input_ids"]
    sequences = [tokens for tokens in sequences if len(tokens) > 1]
    if not sequences:
        raise ValueError("no passage has more than one token: there is nothing to learn")
    return sequences


def unigram_entropy(sequences: Iterable[Sequence[int]]) -> float:
    """Return the entropy of the targets' distribution, in nats per token.

    That is the mean loss of the best model that knows how frequent each token is, but sees none of
    the tokens before the target. A model with a lower loss has learnt from the context.
    """
    counts = Counter(token for tokens in sequences for token in tokens[1:])
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def by_length(
    lengths: Sequence[int], size: int, order: random.Random, *, window: int = 32
) -> list[list[int]]:
    """Return batches of sequences of similar length (smart batching).

    The sequences are shuffled, and sorted by length only among `window` batches at a time. The
    batches are then shuffled too, so which sequences share a batch remains random. Each sequence is
    in exactly one batch; the last batch to be made may be smaller than `size`.

    Args:
        lengths: the length of each sequence, in tokens.
        size: the number of sequences in a batch.
        order: a `random.Random`, or another object with a method `shuffle`.
        window: the number of batches whose sequences are sorted together.

    Returns:
        A list of indices into `lengths` for each batch.

    Raises:
        ValueError: if `size` or `window` is below 1.

    Source: the batching of sequences of approximate length in Vaswani et al., "Attention is all you
    need" (2017), section 5.1.
    """
    _require_a_row(size)
    if window < 1:
        raise ValueError(f"window is a number of batches, at least 1, not {window}")
    places = list(range(len(lengths)))
    order.shuffle(places)
    batches = []
    for start in range(0, len(places), size * window):
        near = sorted(places[start : start + size * window], key=lengths.__getitem__)
        batches += [near[first : first + size] for first in range(0, len(near), size)]
    order.shuffle(batches)
    return batches


def at_random(lengths: Sequence[int], size: int, order: random.Random) -> list[list[int]]:
    """Return batches in shuffled order, whatever the lengths: the baseline for `by_length`.

    Raises:
        ValueError: if `size` is below 1.
    """
    _require_a_row(size)
    places = list(range(len(lengths)))
    order.shuffle(places)
    return [places[first : first + size] for first in range(0, len(places), size)]


def padding(
    lengths: Sequence[int],
    batches: Iterable[Sequence[int]],
    length: int | None = None,
    multiple: int = 1,
) -> int:
    """Return the number of padding tokens in batches.

    Args:
        lengths: the length of each sequence, in tokens.
        batches: lists of indices into `lengths`.
        length: the padded length of each batch, in tokens; by default that of its longest sequence.
        multiple: the padded length is rounded up to a multiple of this.
    """
    return sum(
        _up(length or max(lengths[place] for place in batch), multiple) - lengths[place]
        for batch in batches
        for place in batch
    )


def collate(
    sequences: Sequence[Sequence[int]],
    rows: int | None = None,
    pad: int = 0,
    multiple: int = 1,
) -> Batch:
    """Return lists of tokens as one `Batch`, padded to the longest of them.

    Args:
        sequences: the lists of tokens.
        rows: the number of rows to fill up to, so that micro-batches divide the last batch of an
            epoch as well. An added row has one token, which sees itself (a softmax over nothing is
            NaN), and no target. By default no row is added.
        pad: the token that padding consists of; it has no effect on results without experts.
        multiple: the length is rounded up to a multiple of this. With 8, say, there are an eighth
            as many shapes (which helps if each shape needs preparation), at the price of some
            padding.

    Raises:
        ValueError: if there are no sequences, or `rows` are too few for them.
    """
    if not len(sequences):
        raise ValueError("there are no sequences to make a batch of")
    rows = len(sequences) if rows is None else rows
    if rows < len(sequences):
        raise ValueError(f"rows = {rows} are too few for {len(sequences)} sequences")
    shape = rows, _up(max(map(len, sequences)), multiple)
    tokens, mask = torch.full(shape, pad), torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORE_INDEX)
    mask[:, 0] = 1
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
        targets[row, : len(sequence) - 1] = torch.tensor(sequence[1:])
    return Batch(tokens, mask, targets)


def stream(
    sequences: Sequence[Sequence[int]],
    size: int,
    *,
    seed: int = 0,
    pad: int = 0,
    multiple: int = 1,
    batching: Callable[[Sequence[int], int, random.Random], list[list[int]]] = by_length,
    start: int = 0,
) -> Iterator[Batch]:
    """Yield batches of `size` rows without end: every sequence once per epoch.

    Each epoch has a different order, and the same seed leads to the same orders on every rank.

    Args:
        sequences: lists of tokens.
        size: the number of rows in a batch.
        seed: the seed of the orders.
        pad: as in `collate`.
        multiple: as in `collate`.
        batching: makes the batches of an epoch: `by_length` or `at_random`.
        start: how many batches to skip at the beginning, when a training run is resumed.

    Raises:
        ValueError: when the first batch is requested, if there are no sequences, `size` is below 1,
            or `start` is negative; when an epoch begins, if `batching` returns no batch.
    """
    if not sequences:
        raise ValueError("there are no sequences to make batches of")
    _require_a_row(size)
    if start < 0:
        raise ValueError(f"start must be a number of batches to leave out, not {start}")
    lengths = [len(sequence) for sequence in sequences]
    for epoch in count():
        batches = batching(lengths, size, random.Random(f"{seed}/{epoch}"))
        if not batches:
            raise ValueError(f"batching made no batch of {len(lengths)} sequences")
        batches, start = batches[start:], max(start - len(batches), 0)
        for batch in batches:
            yield collate([sequences[place] for place in batch], size, pad, multiple)


def _require_a_row(size):
    if size < 1:
        raise ValueError(f"size is a number of sequences, at least 1, not {size}")


def _up(length, multiple):
    return -(-length // multiple) * multiple
