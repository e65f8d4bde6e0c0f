"""What a training consists of: a mesh, a model, data, and this rank's part of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from naranhi import data, models
from naranhi.autograd import Recompute
from naranhi.context_parallel import cut_sequence, split_sequence
from naranhi.distributed import Mesh
from naranhi.expert_parallel import add_experts
from naranhi.schedules import Schedule
from naranhi.tensor_parallel import (
    gpt2_plan,
    llama_plan,
    parallelize,
    vocabulary_cross_entropy,
)
from naranhi.train.usage import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MULTIPLE = 8  # lengths are multiples of it: the stages do one dry run for each length
ORDER = "head_tail"  # of the positions on context ranks: as much attention on each
COMPUTED_AS = {
    models.GPT2Embedding: (
        "n_head",
        "activation_function",
        "layer_norm_epsilon",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
    ),
    models.LlamaEmbedding: (
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
    ),
}
COEFFICIENT = 0.01  # of the auxiliary loss of experts, as in Switch Transformers


def make_mesh(options: argparse.Namespace) -> Mesh:
    """Return the Mesh; without `options.pp`, its pipelines are as long as the world allows.

    Raises:
        UsageError: the ranks cannot be divided, or `options` do not go together.
    """
    sizes = {axis: getattr(options, axis) for axis in ("dp", "tp", "cp", "ep")}
    ranks, across = dist.get_world_size(), prod(sizes.values())
    if options.pp is None and ranks % across:
        given = [
            f"--{axis} {size}" for axis, size in sizes.items() if size > 1 or axis in ("dp", "tp")
        ]
        raise UsageError(
            f"{', '.join(given[:-1])} and {given[-1]} cannot share "
            f"{ranks} ranks: they are for {across}, or a multiple of that"
        )
    require_sequences(options)
    require_experts(options)
    require_sharding(options)
    return Mesh(options.dp, options.pp or ranks // across, options.tp, options.cp, options.ep)


def require_sequences(options: argparse.Namespace) -> None:
    """Raise UsageError if sequences cannot be divided as `options` say.

    Their lengths are multiples of `MULTIPLE`. A context rank has a head and a tail of each, and the
    ranks of a tensor group may divide those.
    """
    if options.sequence_parallel and (options.tp == 1 or MULTIPLE % options.tp):
        raise UsageError(f"--sequence-parallel goes with --tp 2, 4 or {MULTIPLE}, not {options.tp}")
    if options.cp > 1 and MULTIPLE % (2 * options.cp):
        raise UsageError(
            f"--cp {options.cp} does not divide sequences, whose lengths are multiples of "
            f"{MULTIPLE}, into a head and a tail for each rank: 2 and {MULTIPLE // 2} do"
        )
    if options.cp > 1 and options.dropout:
        raise UsageError(
            f"--cp {options.cp} goes with --dropout 0, not {options.dropout:g}: each rank would "
            "draw masks of its own for its part of a sequence"
        )
    divided = options.tp if options.sequence_parallel or options.experts else 1
    if MULTIPLE % (options.cp * divided):
        why = "--sequence-parallel" if options.sequence_parallel else "--experts"
        raise UsageError(
            f"with {why}, --cp {options.cp} and --tp {options.tp} divide sequences into "
            f"{options.cp * divided} parts, and their lengths are multiples of {MULTIPLE}"
        )


def require_experts(options: argparse.Namespace) -> None:
    """Raise UsageError if there cannot be such experts."""
    experts, top_k = options.experts, options.top_k
    if experts is None:
        for name, given in (("--ep", options.ep > 1), ("--top-k", top_k is not None)):
            if given:
                raise UsageError(f"{name} goes with --experts N, the number of experts")
        return
    if experts % options.ep:
        raise UsageError(f"--ep {options.ep} does not divide --experts {experts}")
    if top_k is not None and top_k > experts:
        raise UsageError(f"--top-k {top_k} is more than --experts {experts}")


def require_sharding(options: argparse.Namespace) -> None:
    """Raise UsageError if there is nothing to shard over, or what cannot be exported."""
    if options.zero and options.dp * options.cp * options.ep == 1:
        raise UsageError(
            f"--zero {options.zero} goes with --dp, --cp or --ep of 2 or more: it shards over the "
            "ranks with the same layers"
        )
    if options.export is not None and options.experts is not None:
        raise UsageError("--export does not go with --experts, which no GPT-2 of transformers has")
    if options.config is not None and options.model is not None:
        raise UsageError("--config is for random weights, and --model for trained ones: give one")


def require_untied(options: argparse.Namespace, schedule: Schedule, tied: bool) -> None:
    """Raise UsageError if two stages would share the embedding's weights, sharded by `--zero`."""
    if options.zero and tied and schedule.virtual_stages > 1:
        raise UsageError(
            f"--zero {options.zero} in a pipeline of several stages goes with --untied: the first "
            "stage and the last would have other shards of the weights that they share"
        )


def default_top_k(experts: int) -> int:
    """Return how many of so many experts a token goes to without `--top-k`."""
    return min(2, experts)


def computed_as(layers: list[nn.Module]) -> str:
    """Return what a model of the same kind and shapes may compute otherwise, in words."""
    config = config_of(layers)
    said = {name: getattr(config, name) for name in COMPUTED_AS[type(layers[0])]}
    in_order = {n: dict(sorted(v.items())) if isinstance(v, dict) else v for n, v in said.items()}
    return ", ".join(f"{name} {value}" for name, value in in_order.items())


def config_of(layers: list[nn.Module]) -> PreTrainedConfig:
    """Return the configuration of the model whose layers these are."""
    return next(
        module.config
        for module in nn.ModuleList(layers).modules()
        if hasattr(getattr(module, "config", None), "model_type")
    )


def build_model_and_data(
    options: argparse.Namespace,
) -> tuple[list[nn.Module], list[list[int]], int, str]:
    """Return the model's layers, the passages as tokens, the padding token, and a line about them.

    Raises:
        UsageError: the batch cannot be divided, or model and tokenizer do not fit.
    """
    several = options.dp * options.ep
    if options.batch % (several * options.microbatches):
        shares = f"{several} shares of " * (several > 1)
        raise UsageError(
            f"--batch {options.batch} cannot be divided into "
            f"{shares}{options.microbatches} micro-batches of one size"
        )
    passages = data.contexts(options.corpus)
    distinct = data.unique(passages)
    source, name = options.model, options.model or options.config
    if options.config is not None:
        source = models.configuration(options.config)
    tokenizer = data.tokenizer(tokenizer_of(options))
    torch.manual_seed(options.seed)
    source = source or models.gpt2_config(vocabulary=len(tokenizer))
    layers = models.causal_lm(source, tied=not options.untied, dropout=options.dropout)
    if options.experts is not None and not isinstance(layers[0], models.GPT2Embedding):
        raise UsageError(f"--experts goes with a GPT-2, and {name} is of another kind")
    words, positions = layers[0].wte.num_embeddings, layers[0].positions
    if len(tokenizer) > words:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} words, the model of {name} only {words}"
        )
    if positions < MULTIPLE:
        raise UsageError(
            f"the model of {name} has {positions} positions: it takes at least {MULTIPLE}"
        )
    sequences = data.encode(tokenizer, distinct, positions // MULTIPLE * MULTIPLE)
    parameters = sum(param.numel() for param in nn.ModuleList(layers).parameters())
    about = (
        f"{len(sequences):,} passages ({len(passages) - len(distinct):,} repeated ones left out), "
        f"{sum(map(len, sequences)):,} tokens, unigram entropy "
        f"{data.unigram_entropy(sequences):.3f} nats a token; {parameters:,} parameters"
    )
    return layers, sequences, tokenizer.pad_token_id, about


def tokenizer_of(options: argparse.Namespace) -> str | None:
    """Return the name or the folder of the model's tokenizer; None for the book's own.

    A configuration alone has none: then it is the one beside it in the folder, if there is one.
    """
    if options.config is None:
        return options.model
    folder = Path(options.config)
    folder = folder.parent if folder.is_file() else folder
    files = "tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model"
    if folder.is_dir() and not any((folder / file).is_file() for file in files):
        return None
    return str(folder) if folder.is_dir() else options.config


def divide(
    layers: list[nn.Module], options: argparse.Namespace, mesh: Mesh
) -> tuple[list[nn.Module], Callable[..., torch.Tensor]]:
    """Return the layers with what this rank has of them, before they are cut into stages.

    Experts come first, for they are drawn from the same seed on every rank; then each layer is
    split over the tensor group, and what it computes with over the context group.

    Returns:
        The layers, and the loss of what the last one returns.
    """
    loss = models.loss
    if options.experts is not None:
        torch.manual_seed(options.seed)
        layers = add_experts(
            layers,
            options.experts,
            options.top_k or default_top_k(options.experts),
            mesh.expert,
            replicas=mesh.expert_replicas,
            coefficient=COEFFICIENT / options.microbatches,
            tensor=mesh.tensor,
            sequence=options.sequence_parallel,
        )
    if mesh.sizes.tensor > 1:
        plan = gpt2_plan()
        if isinstance(layers[0], models.LlamaEmbedding):
            plan = llama_plan(head_norms=layers[1].attn.q_norm is not None)
        parallelize(layers, plan, mesh.tensor, sequence=options.sequence_parallel)
        loss = partial(vocabulary_cross_entropy, group=mesh.tensor)
    if mesh.sizes.context > 1:
        cut_sequence(layers, mesh.context, order=ORDER)
    if options.recompute:
        layers[1:-1] = map(Recompute, layers[1:-1])
    return layers, loss


def share_of(batch: data.Batch, options: argparse.Namespace, mesh: Mesh) -> tuple[Any, Any]:
    """Return inputs and targets of this rank: its rows of each micro-batch, its positions.

    The ranks that share a batch share each micro-batch of one process, and not every one other
    micro-batches: experts are balanced within a micro-batch.
    """
    several = mesh.sizes.data * mesh.sizes.expert
    own = mesh.place.data * mesh.sizes.expert + mesh.place.expert
    rows = torch.arange(options.batch).view(options.microbatches, several, -1)[:, own].flatten()
    share = data.Batch(*(tensor[rows] for tensor in batch))
    if mesh.sizes.context == 1 and options.experts is None:
        return share.inputs, share.targets
    # No mask: padding is on the right, where no token sees it. (Routers see it, and balance it.)
    return share.tokens, split_sequence(share.targets, mesh.context, order=ORDER)
