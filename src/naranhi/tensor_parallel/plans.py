"""The ways to split a layer, and the plans that assign them to a model's layers by name."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from naranhi.models import RotaryAttention
from naranhi.tensor_parallel.attention import ParallelAttention
from naranhi.tensor_parallel.layer_checks import (
    require_embedding,
    require_grouped_heads,
    require_tokenwise,
)
from naranhi.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from naranhi.tensor_parallel.mappings import scatter_to_group
from naranhi.tensor_parallel.random import ShardedDropout
from naranhi.tensor_parallel.sequence_gradients import mark_sequence_module
from naranhi.tensor_parallel.shards import ShardedModule
from naranhi.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)


@dataclass(frozen=True)
class Column:
    """Split a linear layer by its outputs.

    Args:
        parts: how many parts the outputs have, each of which is split separately (see `Split`).
    """

    parts: int = 1

    def cut(
        self, layer: nn.Module, group: dist.ProcessGroup | None, sequence: bool
    ) -> ColumnParallelLinear:
        """Return the layer that computes this rank's outputs."""
        return ColumnParallelLinear(layer, group, self.parts, sequence)


@dataclass(frozen=True)
class Row:
    """Split a linear layer by its inputs, which are the outputs of a layer split by `Column`."""

    def cut(
        self, layer: nn.Module, group: dist.ProcessGroup | None, sequence: bool
    ) -> RowParallelLinear:
        """Return the layer that computes from this rank's inputs."""
        return RowParallelLinear(layer, group, sequence)


@dataclass(frozen=True)
class Heads:
    """Split GPT-2's attention by heads; its c_attn and c_proj need plan entries of their own."""

    needs: ClassVar[tuple[tuple[str, Column | Row], ...]] = (
        ("c_attn", Column(parts=3)),
        ("c_proj", Row()),
    )

    def cut(
        self, layer: nn.Module, group: dist.ProcessGroup | None, sequence: bool
    ) -> ParallelAttention:
        """Return the attention that computes this rank's heads."""
        return ParallelAttention(layer, group)


@dataclass(frozen=True)
class GroupedHeads:
    """Split the attention of `models.llama` by its groups of heads, each with a key and a value.

    Its qkv and proj need plan entries of their own. The attention itself stays as it is: it reads
    from what qkv returns how many groups this rank has.

    Args:
        norms: whether it normalizes heads of queries and keys; if so, the norms need entries, too.
    """

    norms: bool = False

    @property
    def needs(self) -> tuple[tuple[str, Column | Row | PartialGradient], ...]:
        """Return the plan entries that the layers inside the attention need."""
        norms = tuple((f"{kind}_norm", PartialGradient()) for kind in "qk" if self.norms)
        return (("qkv", Column()), ("proj", Row()), *norms)

    def cut(
        self, layer: nn.Module, group: dist.ProcessGroup | None, sequence: bool
    ) -> RotaryAttention:
        """Check the attention, and return it unchanged.

        Raises:
            ValueError: the ranks do not divide the key-value heads, or `norms` does not fit.
            TypeError: another kind of layer, including a subclass.
        """
        require_grouped_heads(layer, dist.get_world_size(group), self.norms)
        return layer


@dataclass(frozen=True)
class Vocabulary:
    """Split an embedding, or a head, by its vocabulary.

    A head then returns the logits of this rank's part of the vocabulary: compute the loss by
    `vocabulary_cross_entropy`. `F.cross_entropy` would be wrong, or say "Target ... is out of
    bounds".

    Args:
        gather_output: whether a head returns the logits of the whole vocabulary on every rank, as
            generation needs, instead of those of this rank's part.
    """

    gather_output: bool = False

    def cut(
        self, layer: nn.Module, group: dist.ProcessGroup | None, sequence: bool
    ) -> VocabularyParallelEmbedding | VocabularyParallelHead:
        """Return the embedding, or the head, of this rank's part of the vocabulary.

        Raises:
            ValueError: `gather_output` for an embedding.
        """
        if not isinstance(layer, nn.Embedding):
            return VocabularyParallelHead(layer, group, sequence, self.gather_output)
        if self.gather_output:
            raise ValueError(
                "what an embedding returns is whole on every rank: gather_output is for a head"
            )
        return VocabularyParallelEmbedding(layer, group, sequence)


@dataclass(frozen=True)
class SequenceParallel:
    """Run a norm, dropout or position embedding, with sequence parallelism, on this rank's tokens.

    Such a layer works on each token separately, and every rank holds it whole.
    """

    def cut(self, layer: nn.Module, group: dist.ProcessGroup | None, sequence: bool) -> nn.Module:
        """Return the layer for this rank's tokens; without `sequence`, return the layer unchanged.

        Raises:
            ValueError: with `sequence`, a layer made of layers, each of which needs a plan entry of
                its own.
        """
        if not sequence:
            return layer
        require_tokenwise(layer)
        if isinstance(layer, nn.Dropout):
            return ShardedDropout(layer.p, group, layer.inplace)
        if isinstance(layer, nn.Embedding):
            return SequencePositions(layer, group)
        layer = copy(layer)  # the copy has the same parameters
        mark_sequence_module(layer, group)
        return layer


@dataclass(frozen=True)
class PartialGradient:
    """Run a norm of queries or keys, or an activation with weights, on this rank's heads or units.

    Every rank holds such a layer whole, between layers split by `Column` and by `Row`, so each
    rank's backward computes a part of the gradient. `sum_sequence_gradients` sums the parts, with
    sequence parallelism and without. (Megatron-LM does so for `--qk-layernorm`.) A norm over all
    heads together is not such a layer: it needs the heads of other ranks.
    """

    def cut(self, layer: nn.Module, group: dist.ProcessGroup | None, sequence: bool) -> nn.Module:
        """Return a copy of the layer, marked for `sum_sequence_gradients`.

        Raises:
            ValueError: a layer made of layers, each of which needs a plan entry of its own.
        """
        require_tokenwise(layer)
        layer = copy(layer)  # the copy has the same parameters
        mark_sequence_module(layer, group)
        return layer


class SequencePositions(ShardedModule):
    """Embed this rank's positions: (..., sequence) to (..., sequence / ranks, hidden).

    Args:
        embedding: the embedding of positions.
        group: the process group; None for the default one.

    Raises:
        ValueError: the ranks do not divide the sequence; raised in the forward.
    """

    num_embeddings: int
    padding_idx: int | None

    def __init__(self, embedding: nn.Embedding, group: dist.ProcessGroup | None):
        super().__init__(group, True)
        require_embedding(embedding)
        self.num_embeddings, self.padding_idx = embedding.num_embeddings, embedding.padding_idx
        self.take("weight", embedding.weight)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of this rank's positions."""
        own = scatter_to_group(positions, self.group)
        return nn.functional.embedding(own, self.weight, self.padding_idx)


def gpt2_plan(
    gather_output: bool = False,
) -> dict[str, Column | Row | Heads | Vocabulary | SequenceParallel]:
    """Return the plan for `models.gpt2`: one all-reduce each way per attention and per MLP.

    It also fits a whole `GPT2LMHeadModel` of transformers. `gather_output` is for the head, see
    `Vocabulary`.
    """
    return {
        "*wte": Vocabulary(),
        "*lm_head": Vocabulary(gather_output),
        "*.attn": Heads(),
        "*.attn.c_attn": Column(parts=3),
        "*.attn.c_proj": Row(),
        "*.mlp.c_fc": Column(),
        "*.mlp.c_proj": Row(),
        "*wpe": SequenceParallel(),
        "*ln_[12f]": SequenceParallel(),
        "*drop": SequenceParallel(),
        "*.resid_dropout": SequenceParallel(),
        "*.mlp.dropout": SequenceParallel(),
    }


def llama_plan(
    gather_output: bool = False, head_norms: bool = False, mlp: bool = True
) -> dict[str, Column | Row | GroupedHeads | Vocabulary | SequenceParallel | PartialGradient]:
    """Return the plan for `models.llama`: one all-reduce each way per attention and per MLP.

    Mixtures of experts come first: `expert_parallel.divide_experts`.

    Args:
        gather_output: for the head, see `Vocabulary`.
        head_norms: whether the attention normalizes heads of queries and keys, as in Qwen3.
        mlp: whether some block has an MLP instead of a mixture of experts.
    """
    mlps = {"*.mlp.gate_up": Column(parts=2), "*.mlp.down": Row()} if mlp else {}
    norms = {"*.attn.[qk]_norm": PartialGradient()} if head_norms else {}
    return {
        "*wte": Vocabulary(),
        "*lm_head": Vocabulary(gather_output),
        "*.attn": GroupedHeads(head_norms),
        "*.attn.qkv": Column(),
        "*.attn.proj": Row(),
        **mlps,
        "*.attn_norm": SequenceParallel(),
        "*.mlp_norm": SequenceParallel(),
        "*.norm": SequenceParallel(),
        **norms,
    }


def mlp_plan() -> dict[str, Column | Row]:
    """Return the plan for `models.mlp`."""
    return {"*up": Column(), "*down": Row()}
