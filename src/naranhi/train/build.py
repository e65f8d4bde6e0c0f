"""The parts of a training run: mesh, model and data; and this rank's share of a batch."""

from __future__ import annotations

import argparse
from math import lcm, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from naranhi import data, models
from naranhi.context_parallel import split_sequence
from naranhi.distributed import Mesh
from naranhi.schedules import Schedule
from naranhi.train.usage import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MULTIPLE = 8  # padded lengths are multiples of it: the stages do a dry run for each length
ORDER = "head_tail"  # of positions on context ranks: balances the attention
GPT2_COMPUTES = (
    "n_head",
    "activation_function",
    "layer_norm_epsilon",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
)
LLAMA_COMPUTES = (
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "num_experts_per_tok",
    "norm_topk_prob",
    "router_aux_loss_coef",
)


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
    """Raise UsageError if sequences cannot be divided as `options` say."""
    if options.sequence_parallel and options.tp == 1:
        raise UsageError("--sequence-parallel goes with --tp 2 or more, not 1")
    if options.cp > 1 and options.dropout:
        raise UsageError(
            f"--cp {options.cp} goes with --dropout 0, not {options.dropout:g}: each rank would "
            "draw masks of its own for its part of a sequence"
        )
    if options.experts is not None and multiple_of(options) > MULTIPLE:
        raise UsageError(
            f"with --cp {options.cp} and --tp {options.tp} sequences are padded to multiples of "
            f"{multiple_of(options)}, in one process to multiples of {MULTIPLE}, and the routers "
            f"of experts see the padding: choose --cp and --tp that need multiples of {MULTIPLE}"
        )


def multiple_of(options: argparse.Namespace) -> int:
    """Return the number that padded sequence lengths are multiples of.

    It is the smallest multiple of `MULTIPLE` that the ranks divide: a context rank has a head and a
    tail of each sequence, and the ranks of a tensor group may split this part further.
    """
    divided = options.tp if options.sequence_parallel or options.experts else 1
    return lcm(MULTIPLE, 2 * options.cp if options.cp > 1 else 1, options.cp * divided)


def require_experts(options: argparse.Namespace) -> None:
    """Raise UsageError if the options about experts do not fit together."""
    experts, top_k = options.experts, options.top_k
    if experts is None:
        if top_k is not None:
            raise UsageError("--top-k goes with --experts N, the number of experts")
        if options.ep > 1:
            raise UsageError("--ep goes with --experts N, the number of experts, or with a mixture")
        return
    if experts % options.ep:
        named = f"the {experts} experts of the model" if options.mixture else f"--experts {experts}"
        raise UsageError(f"--ep {options.ep} does not divide {named}")
    if top_k is not None and top_k > experts:
        raise UsageError(f"--top-k {top_k} is more than --experts {experts}")


def with_own_experts(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options; if the model is a mixture, with its number of experts, and `mixture` set.

    Raises:
        UsageError: two models are named, --experts or --top-k is given too, or experts are too few.
        OSError: the model's configuration is not cached and cannot be fetched.
        ValueError: the configuration cannot be read.
    """
    if options.config is not None and options.model is not None:
        raise UsageError("--config is for random weights, and --model for trained ones: give one")
    name = options.model or options.config
    config = None if name is None else models.configuration(name)
    if config is None or not models.is_mixture(config):
        return options
    for option, given in (("--experts", options.experts), ("--top-k", options.top_k)):
        if given is not None:
            raise UsageError(
                f"{option} goes with a GPT-2, and {name} is a mixture of {config.num_experts} "
                f"experts, {config.num_experts_per_tok} for each token"
            )
    if config.num_experts_per_tok > config.num_experts:
        raise UsageError(
            f"{name} has {config.num_experts_per_tok} experts for each token "
            f"(num_experts_per_tok), and only {config.num_experts} in all"
        )
    return argparse.Namespace(**vars(options) | {"experts": config.num_experts, "mixture": True})


def require_sharding(options: argparse.Namespace) -> None:
    """Raise UsageError if there is nothing to shard over, or the model cannot be exported."""
    if options.zero and options.dp * options.cp * options.ep == 1:
        raise UsageError(
            f"--zero {options.zero} goes with --dp, --cp or --ep of 2 or more: it shards over the "
            "ranks with the same layers"
        )
    if options.export is not None and options.experts is not None and not options.mixture:
        raise UsageError("--export does not go with --experts: transformers has no such GPT-2")


def require_untied(options: argparse.Namespace, schedule: Schedule, tied: bool) -> None:
    """Raise UsageError if two stages would share the embedding's weights, sharded by `--zero`."""
    if options.zero and tied and schedule.virtual_stages > 1:
        raise UsageError(
            f"--zero {options.zero} in a pipeline of several stages goes with --untied: the first "
            "stage and the last would have different shards of the weights that they share"
        )


def default_top_k(experts: int) -> int:
    """Return how many of `experts` experts a token is routed to without `--top-k`."""
    return min(2, experts)


def computed_as(config: PreTrainedConfig) -> str:
    """Return the settings that change a model's computation but not its shapes, as text."""
    names = GPT2_COMPUTES if config.model_type == "gpt2" else LLAMA_COMPUTES
    said = {name: getattr(config, name) for name in names if hasattr(config, name)}
    in_order = {n: dict(sorted(v.items())) if isinstance(v, dict) else v for n, v in said.items()}
    return ", ".join(f"{name} {value}" for name, value in in_order.items())


def build_model_and_data(
    options: argparse.Namespace,
) -> tuple[models.DeferredLM, list[list[int]], int, str]:
    """Return the model, the passages as tokens, the padding token, and a line about them.

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
    source = source or models.gpt2_config(vocabulary=len(tokenizer))
    model = models.DeferredLM(source, tied=not options.untied, dropout=options.dropout)
    layers = model.layers
    added = options.experts is not None and not options.mixture
    if added and not isinstance(layers[0], models.GPT2Embedding):
        raise UsageError(
            f"--experts goes with a GPT-2, and {name} is not one: for a mixture of experts of its "
            "kind, choose Mixtral or Qwen3-MoE"
        )
    model_named = f"the model of {name}" if name else "the default model"
    words, positions = layers[0].wte.num_embeddings, layers[0].positions
    if len(tokenizer) > words:
        raise UsageError(f"the tokenizer has {len(tokenizer)} words, {model_named} only {words}")
    if positions < MULTIPLE:
        raise UsageError(f"{model_named} has {positions} positions: it takes at least {MULTIPLE}")
    limit = positions // MULTIPLE * MULTIPLE
    sequences = data.encode(tokenizer, distinct, limit)
    longest, multiple = max(map(len, sequences)), multiple_of(options)
    if -(-longest // multiple) * multiple > positions:
        raise UsageError(
            f"with --cp {options.cp} and --tp {options.tp} sequences are padded to multiples of "
            f"{multiple}: the longest has {longest} tokens, and {model_named} has {positions} "
            "positions"
        )
    cut = sum(len(tokens) == limit for tokens in sequences)
    parameters = sum(param.numel() for param in nn.ModuleList(layers).parameters())
    about = (
        f"{len(sequences):,} passages ({len(passages) - len(distinct):,} repeated ones left out), "
        f"{sum(map(len, sequences)):,} tokens ({cut:,} passages are cut at {limit}, or end there), "
        "unigram entropy "
        f"{data.unigram_entropy(sequences):.3f} nats a token; {parameters:,} parameters"
    )
    return model, sequences, tokenizer.pad_token_id, about


def require_own_log(options: argparse.Namespace) -> None:
    """Raise UsageError if the log would overwrite a file that the training reads."""
    if options.log is None or not Path(options.log).exists():
        return
    for option in ("corpus", "model", "config"):
        path = getattr(options, option)
        files = [] if path is None else [Path(path), *Path(path).glob("*")]
        if any(file.is_file() and file.samefile(options.log) for file in files):
            raise UsageError(f"--log-file {options.log} is a file of --{option}: name another one")


def tokenizer_of(options: argparse.Namespace) -> str | None:
    """Return the name or the folder of the model's tokenizer; None for the book's.

    A configuration file has no tokenizer: use the one in the same folder, if there is one.
    """
    if options.config is None:
        return options.model
    folder = Path(options.config)
    folder = folder.parent if folder.is_file() else folder
    files = "tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model"
    if folder.is_dir() and not any((folder / file).is_file() for file in files):
        return None
    return str(folder) if folder.is_dir() else options.config


def share_of(batch: data.Batch, options: argparse.Namespace, mesh: Mesh) -> tuple[Any, Any]:
    """Return this rank's inputs and targets: its rows of micro-batches; of targets its positions.

    The ranks that share a batch split each micro-batch of one process, instead of taking different
    micro-batches, because experts are balanced within a micro-batch.
    """
    several = mesh.sizes.data * mesh.sizes.expert
    own = mesh.place.data * mesh.sizes.expert + mesh.place.expert
    rows = torch.arange(options.batch).view(options.microbatches, several, -1)[:, own].flatten()
    share = data.Batch(*(tensor[rows] for tensor in batch))
    if mesh.sizes.context == 1 and options.experts is None:
        return share.inputs, share.targets
    # No mask: padding is on the right, where no token sees it. (Routers see it, and balance it.)
    return share.tokens, split_sequence(share.targets, mesh.context, order=ORDER)
