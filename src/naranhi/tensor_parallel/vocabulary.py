"""The vocabulary split over ranks: embedding, head, and a cross-entropy that never sees all logits.

Logits are the largest activation of a language model, (batch, sequence, vocabulary). Each rank
computes the logits of its own part of the vocabulary. From the logits of the other ranks it needs
only three values for each position: the largest logit, the sum of the exponentials, and the
target's logit.

A vocabulary that the ranks do not divide (GPT-2's 50,257 is odd) is padded at the end with weights
of 0. Their logits are set to -inf, so they have no part in a softmax and get no gradient.
`full_state_dict` strips the padding.

Source: Shoeybi et al. (2019), section 3.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
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
    """An `nn.Embedding` of which each rank has some rows: integers (...) to (..., hidden).

    The output is the same on every rank; with `sequence`, it is (batch, sequence / ranks, hidden).
    The layer keeps its padding_idx: that row gets no gradient.

    Args:
        embedding: the unsplit embedding.
        group: the process group; None for the default one.
        sequence: whether outputs are split along the sequence.

    Raises:
        ValueError: the embedding has other options (max_norm and the like), or hooks or a
            parametrization would be lost.
        TypeError: another kind of layer, including a subclass.
        RuntimeError: a token is not in the vocabulary; raised in the forward, on a GPU later.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    padding_row: int | None

    def __init__(
        self,
        embedding: nn.Embedding,
        group: dist.ProcessGroup | None = None,
        sequence: bool = False,
    ):
        super().__init__(group, sequence)
        require_embedding(embedding)
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.take("weight", embedding.weight, Split(0, self.num_embeddings, self.ranks))
        self.padding_idx = embedding.padding_idx
        each = len(self.weight)
        is_here = self.padding_idx is not None and self.padding_idx // each == self.rank
        self.padding_row = self.padding_idx % each if is_here else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings, summed over the ranks."""
        fine = ((tokens >= 0) & (tokens < self.num_embeddings)).all()
        torch._assert_async(fine, f"a token is not in the vocabulary of {self.num_embeddings}")
        row, own = _own(tokens, len(self.weight), self.rank)
        rows = F.embedding(row, self.weight, self.padding_row).masked_fill(~own.unsqueeze(-1), 0)
        summed = reduce_scatter_to_sequence if self.sequence else reduce_from_group
        return summed(rows, self.group)


class VocabularyParallelHead(ColumnParallelLinear):
    """Compute the logits of this rank's part of the vocabulary, for `vocabulary_cross_entropy`.

    The head maps (..., hidden) to (..., vocabulary / ranks, rounded up). The logits of the padding
    are -inf.

    With `gather_output` every rank gets all logits, (..., vocabulary), as sampling or a
    different loss needs. Every rank must then compute the same from them: a rank's gradients are
    those of one loss, not a partial sum.

    Args:
        linear: the unsplit head.
        group: the process group; None for the default one.
        sequence: whether inputs are split along the sequence.
        gather_output: whether to return the logits of the whole vocabulary.

    Raises:
        ValueError: hooks or a parametrization would be lost.
        TypeError: another kind of layer, including a subclass.
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: dist.ProcessGroup | None = None,
        sequence: bool = False,
        gather_output: bool = False,
    ):
        require_head(linear)
        super().__init__(linear, group, sequence=sequence, pad=True)
        self.gather_output = gather_output
        words, each = self.splits["weight"].size, self.weight.shape[0]
        own = min(max(words - each * self.rank, 0), each)
        # Added like a bias, so the product needs no second pass over the logits.
        # The mask has values even if the weight, on the meta device, has none.
        device = "cpu" if self.weight.is_meta else None
        zeros = self.weight.detach().new_zeros(own, device=device)
        mask = F.pad(zeros, (0, each - own), value=-math.inf)
        self.register_buffer("mask", mask if own < each else None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's vocabulary, or with `gather_output` all logits."""
        bias = self.bias
        if self.mask is not None:
            mask = self.mask.to(self.weight.dtype)  # ZeRO may compute in another dtype
            bias = mask if bias is None else bias + mask
        logits = self.product(x, bias)
        if self.gather_output:
            logits = gather_from_group(logits, self.group)[..., : self.splits["weight"].size]
        return logits


def refuse_partial_logits(model: nn.Module) -> None:
    """Make methods that would take this rank's logits for all logits raise ValueError.

    These are the methods `generate` and `loss_function` of `transformers`' models: each rank would
    choose among its own part of the vocabulary, so the ranks would continue with different tokens.
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
        f"{method} needs the logits of all words, and {name} returns only those of this rank: "
        "split it with Vocabulary(gather_output=True)"
    )


def vocabulary_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the cross-entropy in nats, summed over the valid targets.

    The forward all-reduces three values for each target, in two all-reduces; the backward sends
    nothing.

    Args:
        logits: this rank's logits, (..., vocabulary / ranks), as a VocabularyParallelHead returns
            them.
        targets: (...), the same on every rank; -100 at positions without a target.
        group: the process group; None for the default one.

    Returns:
        The same scalar on every rank. It is infinite for a target in the padding of the vocabulary.

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: a target is beyond the padded vocabulary; on a GPU raised later.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
    return CrossEntropyFunction.apply(logits, targets, group)


class CrossEntropyFunction(Function):
    """The autograd function of `vocabulary_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Return the summed loss, and save this rank's part of the softmax."""
        given, logits = logits, logits.to(torch.promote_types(logits.dtype, torch.float))
        ctx.dtype = given.dtype
        valid = targets != IGNORE_INDEX
        words = logits.shape[-1] * dist.get_world_size(group)
        fine = (~valid | (targets >= 0) & (targets < words)).all()
        torch._assert_async(fine, f"a target is not among {words} words")
        column, own = _own(targets, logits.shape[-1], dist.get_rank(group))

        largest = start_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)()
        score = (_at(logits, column) - largest).masked_fill(~own, 0)
        # The largest activation of a model: no second copy where a cast has just made one.
        shift = largest.unsqueeze(-1)
        softmax = (logits - shift if logits is given else logits.sub_(shift)).exp_()
        score, total = start_reduce(torch.stack([score, softmax.sum(-1)]), group)()

        ctx.save_for_backward(softmax.div_(total.unsqueeze(-1)), column, own, valid)
        return (total.log() - score).masked_fill(~valid, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of this rank's logits, without communication."""
        softmax, column, own, valid = ctx.saved_tensors
        gradient = gradient * valid
        grad = softmax * gradient.unsqueeze(-1)
        grad.scatter_add_(-1, column.unsqueeze(-1), -(gradient * own).unsqueeze(-1))
        return grad.to(ctx.dtype), None, None


def _own(numbers, each, rank):
    """Return the index of each token among this rank's `each` (else 0), and whether it is there."""
    place = numbers - each * rank
    own = (place >= 0) & (place < each)
    return place.masked_fill(~own, 0), own


def _at(logits, column):
    return logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)
