"""Attention between a column-parallel and a row-parallel layer: each rank computes some heads.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from naranhi.distributed.shared_groups import SharesGroups
from naranhi.tensor_parallel.layer_checks import require_attention
from naranhi.tensor_parallel.random import fork_rng


class ParallelAttention(SharesGroups, nn.Module):
    """Compute some heads of GPT-2's attention (`transformers`' GPT2Attention) on each rank.

    Input and output are (batch, sequence, hidden), the same on every rank; with sequence
    parallelism (batch, sequence / ranks, hidden). Attention dropout draws different random numbers
    on each rank.

    Args:
        attention: the unsplit layer. Before the first forward, `c_attn` must be a
            ColumnParallelLinear of 3 parts, and `c_proj` a RowParallelLinear.
        group: the process group; None for the default one.

    Raises:
        ValueError: the ranks do not divide the heads, the layer has cross attention or
            `reorder_and_upcast_attn`, hooks would be lost, or forward gets a cache or a wrong mask.
        TypeError: another kind of layer, including a subclass.
    """

    group: dist.ProcessGroup | None
    scaling: float
    head_size: int
    eager: bool
    c_attn: nn.Module
    c_proj: nn.Module
    attn_dropout: nn.Dropout
    resid_dropout: nn.Dropout

    def __init__(self, attention: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        ranks = dist.get_world_size(group)
        require_attention(attention)
        if attention.num_heads % ranks:
            raise ValueError(f"{ranks} ranks do not divide {attention.num_heads} heads")
        if attention.is_cross_attention or attention.reorder_and_upcast_attn:
            raise ValueError("cross attention and reorder_and_upcast_attn are not provided for")
        self.group, self.scaling, self.head_size = group, attention.scaling, attention.head_dim
        self.eager = attention.config._attn_implementation == "eager"
        self.c_attn, self.c_proj = attention.c_attn, attention.c_proj
        self.attn_dropout, self.resid_dropout = attention.attn_dropout, attention.resid_dropout

    def forward(
        self,
        x: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: object = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention's output, and None in place of the attention weights."""
        if past_key_values is not None:
            raise ValueError("attention split over ranks has no cache: pass use_cache=False")
        # Each is (batch, heads of this rank, sequence, head size).
        q, k, v = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, -1)
        )
        length = q.shape[2]
        if attention_mask is not None and attention_mask.shape[-1] != length:
            raise ValueError(
                f"a mask of {attention_mask.shape[-1]} for {length} tokens: with "
                "sequence parallelism, eager attention needs a padding mask"
            )
        dropout = self.attn_dropout.p if self.training else 0.0
        attend = _eager if self.eager else _fused
        if dropout:
            with fork_rng(x, self.group):
                values = attend(q, k, v, attention_mask, dropout, self.scaling)
        else:
            values = attend(q, k, v, attention_mask, dropout, self.scaling)
        return self.resid_dropout(self.c_proj(values.transpose(1, 2).flatten(2))), None


def _fused(q, k, v, mask, dropout, scaling):
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, scale=scaling
    )


def _eager(q, k, v, mask, dropout, scaling):
    scores = q @ k.transpose(-1, -2) * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return F.dropout(weights, dropout) @ v
