"""The vocabulary split over ranks: embedding, head, and a cross-entropy that never sees all logits.

Logits are the largest activation of a language model, (batch, sequence, words). Each rank computes
those of its own words, and of the others' it needs only three numbers for each token: the largest,
the sum of the exponentials, and the target's.

A vocabulary that the ranks do not divide (GPT-2's 50,257 is odd) is filled up, at the end: with
weights of 0, whose logits are made -inf, so that they have no part in a softmax, and get no
gradient. `full_state_dict` strips them.

Source: Shoeybi et al. (2019), section 3.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from naranhi.models import IGNORE_INDEX
from naranhi.tensor_parallel.layer_checks import require_embedding, require_head
from naranhi.tensor_parallel.layers import ColumnParallelLinear
from naranhi.tensor_parallel.mappings import (
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_sequence,
    start_reduce,
)
from naranhi.tensor_parallel.shards import ShardedModule, Split


class VocabularyParallelEmbedding(ShardedModule):
    """An `nn.Embedding` of which this rank has some of the rows: (...) whole numbers to (...,
    hidden), on every rank the same; with `sequence`, (batch, sequence / ranks, hidden).

    Its padding_idx is kept: that row gets no gradient.

    Raises ValueError for other options (max_norm and the like), and where hooks or a
    parametrization would be lost; TypeError for another kind of layer, also a subclass. A token
    that is not in the vocabulary raises RuntimeError in the forward, on a GPU later than that.
    """

    def __init__(self, embedding, group=None, sequence=False):
        super().__init__(group, sequence)
        require_embedding(embedding)
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.take("weight", embedding.weight, Split(0, self.num_embeddings, self.ranks))
        self.padding_idx = embedding.padding_idx
        each = len(self.weight)
        is_here = self.padding_idx is not None and self.padding_idx // each == self.rank
        self.padding_row = self.padding_idx % each if is_here else None

    def forward(self, tokens):
        fine = ((tokens >= 0) & (tokens < self.num_embeddings)).all()
        torch._assert_async(fine, f"a token is not in the vocabulary of {self.num_embeddings}")
        row, here = _own(tokens, len(self.weight), self.rank)
        rows = F.embedding(row, self.weight, self.padding_row).masked_fill(~here.unsqueeze(-1), 0)
        summed = reduce_scatter_to_sequence if self.sequence else reduce_from_group
        return summed(rows, self.group)


class VocabularyParallelHead(ColumnParallelLinear):
    """The head, a linear layer of which this rank has some of the words: (..., hidden) to logits
    (..., words / ranks, rounded up), for `vocabulary_cross_entropy`. Those of the padding are -inf.

    With `gather_output` every rank gets all logits, (..., words), as sampling and a loss of
    somebody else's need them. Every rank has to go on alike with them: its gradients are those of
    one loss, not a part of a sum.

    Raises ValueError where hooks or a parametrization would be lost; TypeError for another kind of
    layer, also a subclass.
    """

    def __init__(self, linear, group=None, sequence=False, gather_output=False):
        require_head(linear)
        super().__init__(linear, group, sequence=sequence, pad=True)
        self.gather_output = gather_output
        words, each = self.splits["weight"].size, self.weight.shape[0]
        own = min(max(words - each * self.rank, 0), each)
        # Added as a bias is, for which the product needs no second pass over the logits.
        mask = F.pad(self.weight.detach().new_zeros(own), (0, each - own), value=-math.inf)
        self.register_buffer("mask", mask if own < each else None, persistent=False)

    def forward(self, x):
        bias = self.bias
        if self.mask is not None:
            bias = self.mask if bias is None else bias + self.mask
        logits = self.product(x, bias)
        if self.gather_output:
            logits = gather_from_group(logits, self.group)[..., : self.splits["weight"].size]
        return logits


def refuse_partial_logits(model):
    """Let those parts of a model raise ValueError that would take a head's part for all logits.

    These are the methods `generate` and `loss_function` of `transformers`' models: each rank would
    choose among its own words, and so go on with other tokens than the others.
    """
    for owner in model.modules():
        names = [
            name
            for name, layer in owner.named_modules()
            if isinstance(layer, VocabularyParallelHead) and not layer.gather_output
        ]
        for method in ("generate", "loss_function") if names else ():
            if hasattr(type(owner), method):
                setattr(owner, method, partial(_refuse_part, names[0], method))


def _refuse_part(name, method, *_, **__):
    raise ValueError(
        f"{method} needs the logits of all words, and {name} returns those of this "
        "rank only: cut it by Vocabulary(gather_output=True)"
    )


def vocabulary_cross_entropy(logits, targets, group=None):
    """Cross-entropy in nats, summed over the valid targets: the same scalar on every rank.

    logits: this rank's, (..., words / ranks), as a VocabularyParallelHead makes them. targets:
    (...), the same on every rank, -100 where there is none. Sends three numbers for each target
    in the forward, and nothing in the backward. A target beyond the vocabulary gives an infinite
    loss, or raises RuntimeError (on a GPU later). ValueError for shapes that do not fit.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
    return CrossEntropyFunction.apply(logits, targets, group)


class CrossEntropyFunction(Function):
    @staticmethod
    def forward(ctx, logits, targets, group):
        ctx.dtype, logits = logits.dtype, logits.to(torch.promote_types(logits.dtype, torch.float))
        valid = targets != IGNORE_INDEX
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
