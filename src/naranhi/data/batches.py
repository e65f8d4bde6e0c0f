"""From passages to batches: shuffled, of like length, padded no further than needed.

A token is predicted from those before it, so a passage of n tokens has n - 1 targets. Where there
is nothing to predict the target is -100, which the loss leaves out; padding never counts, whatever
token it is made of. `count` is the number of valid targets, by which the summed loss is divided.
"""

import math
import random
from collections import Counter
from itertools import count
from typing import NamedTuple

import torch

from naranhi.models import IGNORE_INDEX


class Batch(NamedTuple):
    """Rows of tokens, padded on the right to the longest. All three are (rows, length), int64.

    mask: 1 for a token, 0 for padding. targets: the token that follows, or -100.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor

    @property
    def inputs(self):
        """What GPT-2's embedding takes."""
        return self.tokens, self.mask

    @property
    def count(self):
        """How many targets are valid: what the summed loss of the step is divided by."""
        return int((self.targets != IGNORE_INDEX).sum())

    @property
    def padding(self):
        """How many of the tokens are padding."""
        return int((self.mask == 0).sum())

    def to(self, device):
        return Batch(*(tensor.to(device) for tensor in self))


def encode(tokenizer, passages, length):
    """The tokens of each passage, a list of lists of numbers, each cut to at most `length`.

    A passage of one token has nothing to predict and is left out. ValueError if none is left.
    """
    found = tokenizer(list(passages), truncation=True, max_length=length)["input_ids"]
    found = [tokens for tokens in found if len(tokens) > 1]
    if not found:
        raise ValueError("no passage has more than one token: there is nothing to learn")
    return found


def unigram_entropy(sequences):
    """The entropy of the targets' distribution, in nats per token.

    That is the mean loss of the best model that knows how frequent each token is, and nothing of
    what stands before it: whoever is below has learnt from the context.
    """
    counts = Counter(token for tokens in sequences for token in tokens[1:])
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def by_length(lengths, size, order, window=32):
    """Smart batching: batches, as lists of places in `lengths`, of sequences of like length.

    The sequences are shuffled, and sorted by length only among `window` batches at a time, which
    are then shuffled themselves: what meets what remains a matter of chance. Each sequence is in
    exactly one batch; the last to be made may be smaller than `size`.

    order: a `random.Random`, or anything else that shuffles. Source: the batching of sequences of
    approximate length in Vaswani et al., "Attention is all you need" (2017), section 5.1.
    """
    places = list(range(len(lengths)))
    order.shuffle(places)
    batches = []
    for start in range(0, len(places), size * window):
        near = sorted(places[start : start + size * window], key=lengths.__getitem__)
        batches += [near[first : first + size] for first in range(0, len(near), size)]
    order.shuffle(batches)
    return batches


def at_random(lengths, size, order):
    """Shuffled, and cut into batches as it comes: what `by_length` is compared to."""
    places = list(range(len(lengths)))
    order.shuffle(places)
    return [places[first : first + size] for first in range(0, len(places), size)]


def padding(lengths, batches, length=None, multiple=1):
    """How many tokens of padding batches have, each padded to its longest sequence, or to `length`;
    and that to a multiple of something.
    """
    return sum(
        _up(length or max(lengths[place] for place in batch), multiple) - lengths[place]
        for batch in batches
        for place in batch
    )


def collate(sequences, rows=None, pad=0, multiple=1):
    """The Batch of some lists of tokens, as long as the longest of them.

    rows: fill up to as many, so that micro-batches divide the last batch of an epoch as well. Such
    a row is one token, which sees itself (a softmax over nothing is not a number), and no target.
    pad: the token that padding is made of. It matters to nothing.
    multiple: of what the length is a multiple. With 8, say, there are an eighth as many shapes,
    where something has to be prepared for each, at the price of some padding.
    """
    rows = len(sequences) if rows is None else rows
    shape = rows, _up(max(map(len, sequences)), multiple)
    tokens, mask = torch.full(shape, pad), torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORE_INDEX)
    mask[:, 0] = 1
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
        targets[row, : len(sequence) - 1] = torch.tensor(sequence[1:])
    return Batch(tokens, mask, targets)


def stream(sequences, size, seed=0, pad=0, multiple=1, batching=by_length):
    """Batch after batch of `size` rows, without end: every sequence once in an epoch.

    Each epoch has an order of its own, and the same seed gives the same orders on every rank.
    """
    lengths = [len(sequence) for sequence in sequences]
    for epoch in count():
        for batch in batching(lengths, size, random.Random(f"{seed}/{epoch}")):
            yield collate([sequences[place] for place in batch], size, pad, multiple)


def _up(length, multiple):
    return -(-length // multiple) * multiple
