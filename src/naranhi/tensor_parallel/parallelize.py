"""Tensor parallelism: split each layer over a group of ranks that all work on the same data.

    layers = models.gpt2(config)                     # from one seed: equal on every rank
    parallelize(layers, gpt2_plan(), group)          # this rank keeps its shard
    loss = vocabulary_cross_entropy(forward(layers, tokens), targets, group)

A plan says which layers are split, and how, by patterns of names. The other modules of this package
hold what the split layers consist of: the functions that enter and leave the split region
(`mappings`), linear layers and attention (`layers`, `attention`), embedding, head and cross-entropy
(`vocabulary`), random numbers (`random`) and state (`shards`).

With sequence parallelism, everything between the split layers (norms, dropout, residuals) is split
too, along the sequence. `sum_sequence_gradients` (`sequence_gradients`) then ends each step's
backward, unless ZeRO or other hooks have already used the gradients.

Every rank of the group needs the same batch, in the same order, and the same state of torch's
random number generators. `distributed.agree(group, tokens=..., targets=...)` compares batches.

Sources: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model
parallelism" (2019); Korthikanti et al., "Reducing activation recomputation in large Transformer
models" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from naranhi.distributed import fingerprint, from_all_ranks
from naranhi.tensor_parallel.attention import ParallelAttention
from naranhi.tensor_parallel.layer_checks import (
    require_embedding,
    require_layers_of_tokens,
    require_slow_path,
    require_tokenwise,
)
from naranhi.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from naranhi.tensor_parallel.mappings import (
    scatter_to_group,
)
from naranhi.tensor_parallel.random import ShardedDropout
from naranhi.tensor_parallel.sequence_gradients import (
    mark_sequence_module,
    sequence_parameters,
    sum_before_other_hooks,
)
from naranhi.tensor_parallel.shards import ShardedModule, as_module
from naranhi.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    refuse_partial_logits,
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
class Vocabulary:
    """Split an embedding, or a head, by its vocabulary.

    Args:
        gather_output: whether a head returns the logits of the whole vocabulary on every rank, as
            generation needs them, instead of the logits of the rank's own tokens.
    """

    gather_output: bool = False

    def cut(
        self, layer: nn.Module, group: dist.ProcessGroup | None, sequence: bool
    ) -> VocabularyParallelEmbedding | VocabularyParallelHead:
        """Return the embedding, or the head, of this rank's tokens of the vocabulary.

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
        """Return the layer for this rank's part of the sequence; without `sequence`, the layer.

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


def mlp_plan() -> dict[str, Column | Row]:
    """Return the plan for `models.mlp`."""
    return {"*up": Column(), "*down": Row()}


def parallelize(
    model: nn.Module | list[nn.Module],
    plan: Mapping[str, Column | Row | Heads | Vocabulary | SequenceParallel],
    group: dist.ProcessGroup | None = None,
    *,
    sequence: bool = False,
) -> nn.Module | list[nn.Module]:
    """Split a model's layers over the ranks of a group, in place, and return the model.

    Args:
        model: a module, or a list of layers, with the same weights on every rank (built from the
            same seed, or loaded). Each rank keeps its own shard of the parameters that are split.
        plan: {pattern: Column(), Row(), ...}. A pattern is a name as in `named_modules` (for a
            list, a name begins with the layer's index), in which * matches anything.
        group: the process group; None for the default one.
        sequence: whether to split the activations between these layers, too, along the sequence.

    Raises:
        ValueError: raised on every rank of the group, before anything is changed. A pattern matches
            no layer; a layer matches two patterns, or is split already; the ranks do not divide
            heads, inputs or outputs; a tied parameter is not split in the same way everywhere; the
            ranks have different plans or weights; or a split layer would lose something, such as
            hooks, parametrizations and pruning.
        TypeError: raised in the same way. A layer cannot be split as planned, including a subclass
            of a layer that can.
    """
    module, error, new = as_module(model), None, {}
    try:
        new = _new_layers(module, plan, group, sequence)
    except (TypeError, ValueError) as wrong:
        error = wrong
    _agree(module, f"{plan}, sequence={sequence}", error, group)
    for name, layer in new.items():  # attention before the layers in it
        module.set_submodule(name, layer)
        if isinstance(model, list) and name.isdigit():
            model[int(name)] = layer
    refuse_partial_logits(module)
    sum_before_other_hooks(module)
    return model


def _new_layers(module, plan, group, sequence):
    """Return {name: the layer that replaces it}, in the order of `named_modules`."""
    if sequence:
        require_layers_of_tokens(module)
    # A layer used in two places has two names.
    layers, chosen, new = dict(module.named_modules(remove_duplicate=False)), {}, {}
    for pattern, way in plan.items():
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"the plan names {pattern!r}, but no layer is called so")
        for name in names:
            if name in chosen or isinstance(layers[name], (ShardedModule, ParallelAttention)):
                raise ValueError(f"{name} is split twice")
            chosen[name] = way
    for name in [name for name in layers if name in chosen]:
        for child, way in getattr(chosen[name], "needs", ()):
            if chosen.get(f"{name}.{child}") != way:
                raise ValueError(f"{name}: the plan has to split its {child} as {way}")
        try:
            require_slow_path(layers[name.rpartition(".")[0]])
            new[name] = chosen[name].cut(layers[name], group, sequence)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        new[name].train(layers[name].training)
    _tie(layers, new)
    return new


def _tie(layers, new):
    """Share again, among the new layers, every parameter that several layers shared."""
    users = {}
    for name, layer in layers.items():
        for own, parameter in layer.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((name, own))
    for (first, own), *others in users.values():
        for name, other in others:
            if _way(new.get(first), own) != _way(new.get(name), other):
                raise ValueError(
                    f"{first}.{own} and {name}.{other} are one parameter: the plan "
                    "has to split both alike, or none"
                )
            if own in getattr(new.get(first), "splits", ()):
                setattr(new[name], other, getattr(new[first], own))


def _way(layer, parameter):
    """Return how a layer holds a parameter: its Split, or whether the sequence is split."""
    if parameter in getattr(layer, "splits", ()):
        return layer.splits[parameter]
    return layer is not None and bool(sequence_parameters(layer))


def _agree(module, plan, error, group):
    """Raise the error of any rank, or ValueError if plans or weights differ."""
    tensors = {} if error else dict([*module.named_parameters(), *module.named_buffers()])
    local = error, plan, {name: fingerprint(tensor) for name, tensor in tensors.items()}
    gathered = from_all_ranks(local, group)
    for wrong, _, _ in (local, *gathered):
        if wrong:
            raise wrong
    ranks = dist.get_process_group_ranks(group)
    for rank, (_, other, weights) in zip(ranks, gathered, strict=True):
        if other != gathered[0][1]:
            raise ValueError(f"rank {ranks[0]} and rank {rank} were given different plans")
        for name in gathered[0][2].keys() | weights.keys():
            if gathered[0][2].get(name) != weights.get(name):
                raise ValueError(
                    f"rank {ranks[0]} and rank {rank} start from different weights: {name} differs"
                )
