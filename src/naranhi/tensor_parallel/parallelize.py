"""Tensor parallelism: each layer cut over a group of ranks, all of which work on the same data.

    layers = models.gpt2(config)                     # from one seed, so the same on every rank
    parallelize(layers, gpt2_plan(), group)          # this rank keeps its part of them
    loss = vocabulary_cross_entropy(forward(layers, tokens), targets, group)

A plan says which layers are cut, and how, by patterns of names. Whatever layers a plan consists of,
what they are made of is here too: the ways in and out of the split region (`mappings`), linear
layers and attention (`layers`, `attention`), embedding, head and cross-entropy (`vocabulary`),
random numbers (`random`) and state (`shards`).

With sequence parallelism, what lies between the cut layers (norms, dropout, residuals) is split
too, along the sequence; `sum_sequence_gradients` (`sequence_gradients`) then ends each step's
backward, unless ZeRO or other hooks have taken the gradients already.

Every rank of the group is to be given the same batch, in the same order, and to stand at the same
place of torch's random numbers: `distributed.agree(group, tokens=..., targets=...)`
compares.

Sources: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model
parallelism" (2019); Korthikanti et al., "Reducing activation recomputation in large Transformer
models" (2022).
"""

from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import nn

from naranhi.distributed import fingerprint
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
    """A linear layer is cut by its outputs, each of its parts by itself."""

    parts: int = 1

    def cut(self, layer, group, sequence):
        return ColumnParallelLinear(layer, group, self.parts, sequence)


@dataclass(frozen=True)
class Row:
    """A linear layer is cut by its inputs, which are the outputs of one that is cut by those."""

    def cut(self, layer, group, sequence):
        return RowParallelLinear(layer, group, sequence)


@dataclass(frozen=True)
class Heads:
    """GPT-2's attention is cut by heads; its c_attn and c_proj are in the plan by themselves."""

    needs = ("c_attn", Column(parts=3)), ("c_proj", Row())

    def cut(self, layer, group, sequence):
        return ParallelAttention(layer, group)


@dataclass(frozen=True)
class Vocabulary:
    """An embedding, or a head, is cut by its words. gather_output: a head returns the logits of all
    words on every rank, as generating needs them, and not those of the rank's own words."""

    gather_output: bool = False

    def cut(self, layer, group, sequence):
        if not isinstance(layer, nn.Embedding):
            return VocabularyParallelHead(layer, group, sequence, self.gather_output)
        if self.gather_output:
            raise ValueError(
                "what an embedding returns is whole on every rank: gather_output is for a head"
            )
        return VocabularyParallelEmbedding(layer, group, sequence)


@dataclass(frozen=True)
class SequenceParallel:
    """A norm, dropout or position embedding works on each token by itself: whole on every rank, but
    with sequence parallelism only for this rank's tokens. ValueError then for a layer made of
    layers, each of which is to be in the plan by itself."""

    def cut(self, layer, group, sequence):
        if not sequence:
            return layer
        require_tokenwise(layer)
        if isinstance(layer, nn.Dropout):
            return ShardedDropout(layer.p, group, layer.inplace)
        if isinstance(layer, nn.Embedding):
            return SequencePositions(layer, group)
        layer = copy(layer)  # which has the same parameters
        mark_sequence_module(layer, group)
        return layer


class SequencePositions(ShardedModule):
    """An embedding of positions, (..., sequence) to (..., sequence / ranks, hidden): of this rank's
    part of the sequence. ValueError when the ranks do not divide it."""

    def __init__(self, embedding, group):
        super().__init__(group, True)
        require_embedding(embedding)
        self.num_embeddings, self.padding_idx = embedding.num_embeddings, embedding.padding_idx
        self.take("weight", embedding.weight)

    def forward(self, positions):
        own = scatter_to_group(positions, self.group)
        return nn.functional.embedding(own, self.weight, self.padding_idx)


def gpt2_plan(gather_output=False):
    """The plan for `models.gpt2`: one all-reduce each way for each attention and each MLP.

    It fits a whole `GPT2LMHeadModel` of transformers too. gather_output: of its head, see
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


def mlp_plan():
    """The plan for `models.mlp`."""
    return {"*up": Column(), "*down": Row()}


def parallelize(model, plan, group=None, sequence=False):
    """Cut a model's layers over the ranks of a group, in place; returns the model.

    model: a module, or a list of layers, with the same weights on every rank (made from the same
        seed, or loaded). Each rank keeps its own part of the parameters that are cut.
    plan: {pattern: Column(), Row(), ...}. A pattern is a name as in `named_modules` (of a list,
        from the layer's number on), in which * stands for anything.
    sequence: also split what is between these layers along the sequence.

    Raises ValueError on every rank of the group, before anything is changed: for a pattern that no
    layer has, a layer that two patterns have or that is cut already, heads, inputs or outputs that
    the ranks do not divide, a tied parameter not cut alike in all places, for ranks with different
    plans or weights, and for what a cut layer would lose, such as hooks, parametrizations and
    pruning; TypeError for a layer that cannot be cut in this way, also a subclass of one that can.
    """
    module, error, new = as_module(model), None, {}
    try:
        new = _new_layers(module, plan, group, sequence)
    except (TypeError, ValueError) as wrong:
        error = wrong
    _agree(module, f"{plan}, sequence={sequence}", error, group)
    for name, layer in new.items():  # attention before what is in it
        module.set_submodule(name, layer)
        if isinstance(model, list) and name.isdigit():
            model[int(name)] = layer
    refuse_partial_logits(module)
    sum_before_other_hooks(module)
    return model


def _new_layers(module, plan, group, sequence):
    """{name: the layer that takes its place}, in the order of `named_modules`."""
    if sequence:
        require_layers_of_tokens(module)
    # A layer that is used in two places has two names.
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
    """Let what was one parameter in several layers be one again."""
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
    """How a layer has a parameter: cut like that, or whole, on its part of the sequence or not."""
    if parameter in getattr(layer, "splits", ()):
        return layer.splits[parameter]
    return layer is not None and bool(sequence_parameters(layer))


def _agree(module, plan, error, group):
    """Raise the error of any rank, or ValueError where plans or weights differ."""
    tensors = {} if error else dict([*module.named_parameters(), *module.named_buffers()])
    mine = error, plan, {name: fingerprint(one) for name, one in tensors.items()}
    told = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    for wrong, _, _ in (mine, *told):
        if wrong:
            raise wrong
    ranks = dist.get_process_group_ranks(group)
    for rank, (_, other, weights) in zip(ranks, told, strict=True):
        if other != told[0][1]:
            raise ValueError(f"rank {ranks[0]} and rank {rank} were given different plans")
        for name in told[0][2].keys() | weights.keys():
            if told[0][2].get(name) != weights.get(name):
                raise ValueError(
                    f"rank {ranks[0]} and rank {rank} start from different weights: {name} differs"
                )
