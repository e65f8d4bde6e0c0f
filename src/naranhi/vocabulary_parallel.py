"""The vocabulary split over ranks: embedding, head, and a cross-entropy that never sees all logits.

Logits are the largest activation of a language model, (batch, sequence, words). Each rank computes
those of its own words, and of the others' it needs only three numbers for each token: the largest,
the sum of the exponentials, and the target's.

A vocabulary that the ranks do not divide (GPT-2's 50,257 is odd) is filled up, at the end: with
weights of 0, whose logits are made -inf, so that they have no part in a softmax, and get no
gradient. `whole_state` strips them.

Source: Shoeybi et al. (2019), section 3.
"""

import math

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from naranhi.data import NOTHING
from naranhi.tensor_layers import ColumnParallelLinear
from naranhi.tensor_region import reduce_from_group, reduce_scatter_to_sequence, start_reduce
from naranhi.tensor_shards import Sharded, Split


class VocabularyParallelEmbedding(Sharded):
    """An `nn.Embedding` of which this rank has some of the rows: (...) whole numbers to (...,
    hidden), on every rank the same; with `sequence`, (batch, sequence / ranks, hidden).

    Raises ValueError for an embedding with options (padding_idx, max_norm and the like). A token
    that is not in the vocabulary raises RuntimeError in the forward, on a GPU later than that.
    """

    def __init__(self, embedding, group=None, sequence=False):
        super().__init__(group, sequence)
        if embedding.padding_idx is not None or embedding.max_norm is not None \
                or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError("an embedding with padding_idx, max_norm, scale_grad_by_freq or "
                             "sparse gradients is not provided for")
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.take("weight", embedding.weight, Split(0, self.num_embeddings, self.ranks))

    def forward(self, tokens):
        fine = ((tokens >= 0) & (tokens < self.num_embeddings)).all()
        torch._assert_async(fine, f"a token is not in the vocabulary of {self.num_embeddings}")
        row, here = _own(tokens, len(self.weight), self.rank)
        rows = F.embedding(row, self.weight).masked_fill(~here.unsqueeze(-1), 0)
        summed = reduce_scatter_to_sequence if self.sequence else reduce_from_group
        return summed(rows, self.group)


class VocabularyParallelHead(ColumnParallelLinear):
    """The head, a linear layer of which this rank has some of the words: (..., hidden) to logits
    (..., words / ranks, rounded up), for `vocabulary_cross_entropy`. Those of the padding are -inf.

    Raises TypeError for another kind of layer.
    """

    def __init__(self, linear, group=None, sequence=False):
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"a Linear is needed, not {type(linear).__name__}")
        super().__init__(linear, group, sequence=sequence, pad=True)
        words, each = self.splits["weight"].size, self.weight.shape[0]
        own = min(max(words - each * self.rank, 0), each)
        # Added as a bias is, for which the product needs no second pass over the logits.
        mask = F.pad(self.weight.detach().new_zeros(own), (0, each - own), value=-math.inf)
        self.register_buffer("mask", mask if own < each else None, persistent=False)

    def forward(self, x):
        bias = self.bias
        if self.mask is not None:
            bias = self.mask if bias is None else bias + self.mask
        return self.product(x, bias)


def vocabulary_cross_entropy(logits, targets, group=None):
    """Cross-entropy in nats, summed over the valid targets: the same scalar on every rank.

    logits: this rank's, (..., words / ranks), as a VocabularyParallelHead makes them. targets:
    (...), the same on every rank, -100 where there is none. Sends three numbers for each target
    in the forward, and nothing in the backward. A target beyond the vocabulary gives an infinite
    loss, or raises RuntimeError (on a GPU later). ValueError for shapes that do not fit.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
    return _CrossEntropy.apply(logits, targets, group)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, targets, group):
        ctx.dtype, logits = logits.dtype, logits.to(torch.promote_types(logits.dtype, torch.float))
        valid = targets != NOTHING
        words = logits.shape[-1] * dist.get_world_size(group)
        fine = (~valid | (targets >= 0) & (targets < words)).all()
        torch._assert_async(fine, f"a target is not among {words} words")
        column, here = _own(targets, logits.shape[-1], dist.get_rank(group))

        largest = start_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)()
        score = (_at(logits, column) - largest).masked_fill(~here, 0)
        score = start_reduce(score, group)()
        softmax = (logits - largest.unsqueeze(-1)).exp_()
        total = start_reduce(softmax.sum(-1), group)()

        ctx.save_for_backward(softmax.div_(total.unsqueeze(-1)), column, here, valid)
        return (total.log() - score).masked_fill(~valid, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        softmax, column, here, valid = ctx.saved_tensors
        gradient = gradient * valid
        found = softmax * gradient.unsqueeze(-1)
        found.scatter_add_(-1, column.unsqueeze(-1), -(gradient * here).unsqueeze(-1))
        return found.to(ctx.dtype), None, None


def _own(numbers, each, rank):
    """Where the words with these numbers are among this rank's `each`, and whether they are: where
    they are not, 0."""
    place = numbers - each * rank
    here = (place >= 0) & (place < each)
    return place.masked_fill(~here, 0), here


def _at(logits, column):
    return logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)
