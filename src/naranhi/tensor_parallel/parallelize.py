"""Tensor parallelism: split each layer over a group of ranks that all work on the same data.

    layers = models.gpt2(config)                     # from one seed: equal on every rank
    parallelize(layers, gpt2_plan(), group)          # this rank keeps its shard
    loss = vocabulary_cross_entropy(forward(layers, tokens), targets, group)

A plan says which layers are split, and how, by patterns of names (`plans`). The other modules hold
what the split layers consist of: the functions that enter and leave the split region
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
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import nn

from naranhi.autograd.shared_memory import sharing_memory
from naranhi.distributed import fingerprint, from_all_ranks
from naranhi.tensor_parallel.attention import ParallelAttention
from naranhi.tensor_parallel.layer_checks import require_layers_of_tokens, require_slow_path
from naranhi.tensor_parallel.plans import (
    Column,
    GroupedHeads,
    Heads,
    PartialGradient,
    Row,
    SequenceParallel,
    Vocabulary,
)
from naranhi.tensor_parallel.sequence_gradients import sequence_parameters, sum_before_other_hooks
from naranhi.tensor_parallel.shards import ShardedModule, as_module
from naranhi.tensor_parallel.vocabulary import refuse_partial_logits


def parallelize(
    model: nn.Module | list[nn.Module],
    plan: Mapping[
        str,
        Column | Row | Heads | GroupedHeads | Vocabulary | SequenceParallel | PartialGradient,
    ],
    group: dist.ProcessGroup | None = None,
    *,
    sequence: bool = False,
) -> nn.Module | list[nn.Module]:
    """Split a model's layers over the ranks of a group, in place, and return the model.

    `copy.deepcopy` of the model works in the same group. The model cannot be pickled (`torch.save`
    of the whole model) unless `group` is None.

    Some mistakes are not detected:

    - A trained parameter that the plan does not name has to be used on activations that every rank
      holds whole. Between a column-parallel and a row-parallel layer (PReLU, norms of queries and
      keys), each rank computes a part of its gradient, and nothing sums the parts, unless the plan
      names it as `PartialGradient()`. With `sequence`, the same happens outside (LayerScale),
      unless the plan names it as `SequenceParallel()`.
    - A dropout between a column-parallel and a row-parallel layer draws the same mask on every
      rank, unless it is a `random.ShardedDropout`.
    - A rank that catches an error between two messages and goes on with another step has its
      tensors summed with wrong ones: let an error on one rank end the training of its group.
    - `state_dict()` returns this rank's shards as plain tensors. `torch.distributed.checkpoint`
      takes them for copies, and saves those of one rank: use `checkpoint.Checkpoints`, or
      `full_state_dict`.
    - `torch.amp.GradScaler` decides on each rank by itself, by the shards of that rank, whether to
      skip a step, so that the copies of unsplit parameters drift apart: use bf16, or
      `precision.LossScaler` with its `finite` all-reduced.
    - With `sequence`, parameters need hooks on every rank of the group or on none, because the
      gradient of a parameter with hooks is summed in the backward.
    - With `sequence`, what runs between the split layers sees this rank's part of each sequence:
      positions counted from its length begin at 0 on every rank, unless the embedding is in the
      plan. An attention has to read the length from what its column-parallel layers return.
    - An attention reads its number of heads from what the layers return, not from a constant, and
      a layer whose outputs are several matrices (queries, keys and values together) has to be named
      as `Column(parts=...)`: otherwise heads or matrices are mixed, and only numbers show it.
    - `torch.nn.utils.clip_grad_norm_` takes each rank's norm for the whole norm, so that copies
      of unsplit parameters drift apart: clip by `tensor_parallel.clip_grad_norm_`.
    - Over ranks that hold different shards, torch's `DistributedDataParallel` overwrites them with
      the first rank's, and `fully_shard` mixes rows of them (`data_parallel.DDP` and `zero.Zero`
      refuse that): pass the group of ranks with the same shards, `Mesh.data`.
    - Optimizers that work on a matrix as a whole (Muon, Adafactor) see a shard of it.

    Args:
        model: a module, or a list of layers, with the same weights on every rank (built from the
            same seed, or loaded). Each rank keeps its own shard of the parameters that are split.
            On the meta device it has no weights yet: give them by `materialize`.
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
            raise ValueError(f"the plan names {pattern!r}, but no layer has such a name")
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
        new[name].training = layers[name].training  # its children keep their own
    _tie(layers, new)
    for name, other in sharing_memory(module.named_parameters()):
        if {name.rpartition(".")[0], other.rpartition(".")[0]} & new.keys():
            raise ValueError(
                f"parameters {name} and {other} share memory, and their shards would not: make "
                "them one parameter, or give each its own memory"
            )
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
