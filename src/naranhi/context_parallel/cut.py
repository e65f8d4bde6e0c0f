"""GPT-2 and Llama on a sequence that is cut across ranks.

    layers = cut_sequence(models.gpt2(config, dropout=0.0), group, order="head_tail")
    own = split_sequence(targets, group, order="head_tail")
    count = data_parallel.global_count((own != models.IGNORE_INDEX).sum().item(), group)
    (models.loss(nn.Sequential(*layers)(tokens), own) / count).backward()
    data_parallel.all_reduce_bucketed(model, group)

Every rank receives the whole batch of tokens, and computes only its own positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from naranhi.autograd.module_hooks import require_own_forward
from naranhi.context_parallel.gpt2 import SequenceAttention, SequenceEmbedding
from naranhi.context_parallel.llama import SequenceRotaryAttention, SequenceTokens
from naranhi.context_parallel.order import ORDERS
from naranhi.context_parallel.ring import ring_attention
from naranhi.models import (
    GPT2Block,
    GPT2Embedding,
    GPT2Head,
    LlamaBlock,
    LlamaEmbedding,
    LlamaHead,
    RotaryAttention,
)

# Compared by name: one is in transformers, one in a package that must not be imported here.
ATTENTIONS = {
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Attention"),
    ("naranhi.tensor_parallel.attention", "ParallelAttention"),
}


def cut_sequence(
    layers: list[nn.Module],
    group: dist.ProcessGroup | None = None,
    *,
    attention: Callable[..., torch.Tensor] = ring_attention,
    order: str = "plain",
) -> list[nn.Module]:
    """Make the layers of `models.gpt2` or `models.llama` work on this rank's positions, in place.

    The first layer takes all tokens, the same on every rank, and embeds this rank's; the last layer
    returns logits, (batch, sequence / ranks, vocabulary). Parameters do not change.

    Args:
        layers: what `models.gpt2` returned, without dropout, or `models.llama`, equal on every
            rank; or what `tensor_parallel.parallelize` made of it.
        group: the process group; None for the default one.
        attention: `ring_attention`, `gathered_attention` or `ulysses_attention`.
        order: "plain" or "head_tail".

    Returns:
        `layers`, changed in place.

    Raises:
        ValueError: a layer has dropout, whose masks the ranks would not draw as one process does;
            a layer has cross attention or `reorder_and_upcast_attn`; the order is unknown; or a
            replaced layer has hooks, or a replaced or compiled forward, which would be lost.
        TypeError: the layers are not those of `models.gpt2` or `models.llama`, or subclasses of
            them.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, not {order!r}")
    kinds = {GPT2Embedding: (GPT2Block, GPT2Head), LlamaEmbedding: (LlamaBlock, LlamaHead)}
    if not layers or type(layers[0]) not in kinds:
        raise TypeError("the first layer must be the embedding of models.gpt2 or models.llama")
    block, head = kinds[type(layers[0])]
    for number, layer in enumerate(layers[1:], 1):
        if not isinstance(layer, block | head):
            model = "gpt2" if block is GPT2Block else "llama"
            raise TypeError(
                f"layer {number} is a {type(layer).__name__}, not a block or head of "
                f"models.{model}: wrap layers, as Recompute does, after cut_sequence"
            )
    for name, module in nn.Sequential(*layers).named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise ValueError(f"{name} has dropout of {module.p}: make the model with dropout=0.0")
    blocks = [layer for layer in layers if isinstance(layer, block)]
    if block is GPT2Block:
        _require_replaceable(layers)
        for layer in blocks:
            layer.block.attn = SequenceAttention(layer.block.attn, attention, group, order)
        layers[0] = SequenceEmbedding(layers[0], group, order)
    else:
        _require_own(_replaced_of_llama(layers))
        for layer in blocks:
            layer.attn = SequenceRotaryAttention(layer.attn, attention, group, order)
        layers[0] = SequenceTokens(layers[0], group, order)
    return layers


def _replaced_of_llama(layers):
    """Return {name: module that is replaced}; raise TypeError for another kind of attention."""
    replaced = {"0": layers[0]}
    for number, layer in enumerate(layers):
        if (attention := getattr(layer, "attn", None)) is not None:
            replaced[f"{number}.attn"] = attention
            if type(attention) is not RotaryAttention:
                raise TypeError(_strange(f"{number}.attn", attention, "llama"))
    return replaced


def _require_replaceable(layers):
    """Raise TypeError or ValueError if replacing embedding or attention would lose behaviour."""
    lost = {"0": layers[0], "0.drop": layers[0].drop}
    for number, layer in enumerate(layers):
        if attention := getattr(getattr(layer, "block", None), "attn", None):
            name = f"{number}.block.attn"
            if (type(attention).__module__, type(attention).__name__) not in ATTENTIONS:
                raise TypeError(_strange(name, attention, "gpt2"))
            lost |= {name: attention, f"{name}.resid_dropout": attention.resid_dropout}
    _require_own(lost)
    for name, module in lost.items():
        # A ParallelAttention lacks both attributes: `parallelize` raises for them.
        if getattr(module, "is_cross_attention", False) or getattr(
            module, "reorder_and_upcast_attn", False
        ):
            raise ValueError(
                f"{name}: cross attention and reorder_and_upcast_attn are not provided for"
            )


def _strange(name, attention, model):
    return (
        f"{name} is a {type(attention).__name__}, whose own behaviour would be lost: the attention "
        f"of models.{model} is needed"
    )


def _require_own(modules):
    """Raise ValueError if a call of one of {name: module} runs more than its class's forward."""
    for name, module in modules.items():
        try:
            require_own_forward(module, "cut_sequence")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
