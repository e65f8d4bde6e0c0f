"""GPT-2 on a sequence that is cut across ranks.

    layers = cut_sequence(models.gpt2(config, dropout=0.0), group, order="head_tail")
    own = split_sequence(targets, group, order="head_tail")
    count = data_parallel.global_count((own != models.IGNORE_INDEX).sum().item(), group)
    (models.loss(nn.Sequential(*layers)(tokens), own) / count).backward()
    data_parallel.all_reduce_bucketed(model, group)

Every rank is given the whole batch of tokens, and computes only with its own positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from naranhi.autograd.module_hooks import require_own_forward
from naranhi.context_parallel.arguments import is_a_shape
from naranhi.context_parallel.order import ORDERS, positions, split_sequence
from naranhi.context_parallel.ring import ring_attention
from naranhi.distributed import agree
from naranhi.distributed.shared_groups import SharesGroups

# Compared by name: one is of transformers, the other of a package that this one may not import.
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
    """Make the layers of `models.gpt2` work on this rank's positions, in place, and return them.

    The first layer takes the whole tokens, the same on every rank, and embeds this rank's; the last
    one returns logits of (batch, sequence / ranks, vocabulary). Parameters do not change.

    Args:
        layers: what `models.gpt2` returned, without dropout, equal on every rank; or what
            `tensor_parallel.parallelize` made of it.
        group: the process group; None for the default one.
        attention: `ring_attention`, `gathered_attention` or `ulysses_attention`.
        order: "plain" or "head_tail".

    Raises:
        ValueError: a layer has dropout, whose masks the ranks would not draw as one process does;
            a layer attends to more than its own sequence; the order is unknown; or a layer that is
            replaced would lose hooks, or a forward that was replaced or compiled.
        TypeError: the layers are not those of `models.gpt2`, or subclasses of them.
    """
    from naranhi.models.gpt2_blocks import GPT2Block, GPT2Embedding, GPT2Head

    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, not {order!r}")
    if not layers or type(layers[0]) is not GPT2Embedding:
        raise TypeError("the first layer must be the embedding of models.gpt2")
    for number, layer in enumerate(layers[1:], 1):
        if not isinstance(layer, GPT2Block | GPT2Head):
            raise TypeError(
                f"layer {number} is a {type(layer).__name__}, not a block or head of models.gpt2: "
                "wrap layers, as Recompute does, after cut_sequence"
            )
    blocks = [layer.block for layer in layers if isinstance(layer, GPT2Block)]
    for name, module in nn.Sequential(*layers).named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise ValueError(f"{name} has dropout of {module.p}: make the model with dropout=0.0")
    _require_replaceable(layers)
    for block in blocks:
        if getattr(block.attn, "is_cross_attention", False) or getattr(
            block.attn, "reorder_and_upcast_attn", False
        ):  # `parallelize` has refused both
            raise ValueError("cross attention and reorder_and_upcast_attn are not provided for")
    for block in blocks:
        block.attn = SequenceAttention(block.attn, attention, group, order)
    layers[0] = SequenceEmbedding(layers[0], group, order)
    return layers


def _require_replaceable(layers):
    """Raise TypeError or ValueError if embedding or attention would lose behaviour of their own."""
    lost = {"0": layers[0], "0.drop": layers[0].drop}
    for number, layer in enumerate(layers):
        if attention := getattr(getattr(layer, "block", None), "attn", None):
            name = f"{number}.block.attn"
            if (type(attention).__module__, type(attention).__name__) not in ATTENTIONS:
                raise TypeError(
                    f"{name} is a {type(attention).__name__}, whose own behaviour would be lost: "
                    "the attention of models.gpt2 is needed"
                )
            lost |= {name: attention, f"{name}.resid_dropout": attention.resid_dropout}
    for name, module in lost.items():
        try:
            require_own_forward(module, "cut_sequence")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


class SequenceEmbedding(SharesGroups, nn.Module):
    """Embed this rank's positions of tokens that every rank has whole.

    Args:
        embedding: the first of GPT-2's layers.
        group: the process group; None for the default one.
        order: "plain" or "head_tail".
    """

    wte: nn.Embedding
    wpe: nn.Embedding
    group: dist.ProcessGroup | None
    order: str

    def __init__(self, embedding: nn.Module, group: dist.ProcessGroup | None, order: str):
        super().__init__()
        self.wte, self.wpe = embedding.wte, embedding.wpe
        self.group, self.order = group, order

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden state of this rank's tokens, (batch, sequence / ranks, hidden).

        Raises:
            ValueError: on every rank, if the ranks do not divide the sequence, the model has fewer
                positions, or the ranks have different tokens.
        """
        if isinstance(tokens, tuple):
            raise ValueError("no padding masks: pad at the end, with targets that the loss ignores")
        if not is_a_shape(tokens):
            agree(self.group, tokens=tokens)
        length = tokens.shape[-1]
        if length > self.wpe.num_embeddings:
            raise ValueError(f"{length} tokens, but the model has {self.wpe.num_embeddings}")
        own = split_sequence(tokens, self.group, order=self.order)
        place = positions(length, self.group, order=self.order, device=tokens.device)
        return self.wte(own) + self.wpe(place.unsqueeze(0))


class SequenceAttention(SharesGroups, nn.Module):
    """GPT-2's attention of this rank's positions to all.

    Args:
        attention: `transformers`' GPT2Attention, or its heads on this rank of a tensor group
            (`tensor_parallel.ParallelAttention`); its projections are used.
        attend: one of the three ways.
        group: the process group; None for the default one.
        order: "plain" or "head_tail".
    """

    c_attn: nn.Module
    c_proj: nn.Module
    head_size: int
    scale: float
    attend: Callable[..., torch.Tensor]
    group: dist.ProcessGroup | None
    order: str

    def __init__(
        self,
        attention: nn.Module,
        attend: Callable[..., torch.Tensor],
        group: dist.ProcessGroup | None,
        order: str,
    ):
        super().__init__()
        self.c_attn, self.c_proj = attention.c_attn, attention.c_proj
        whole = hasattr(attention, "head_dim")
        self.head_size = attention.head_dim if whole else attention.head_size
        self.scale = attention.scaling
        self.attend, self.group, self.order = attend, group, order

    def forward(self, x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Return the attention's output, and None in place of the attention weights."""
        parts = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, -1)
        )
        # The embedding has compared the ranks' tokens, and so all that follows from them.
        values = self.attend(*parts, self.group, order=self.order, scale=self.scale, check=False)
        return self.c_proj(values.transpose(1, 2).flatten(2)), None
