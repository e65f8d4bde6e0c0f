"""GPT-2's layers on a sequence that is cut across ranks: `cut_sequence` inserts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from naranhi.context_parallel.arguments import require_same_tokens
from naranhi.context_parallel.order import positions, split_sequence
from naranhi.distributed.shared_groups import SharesGroups


class SequenceEmbedding(SharesGroups, nn.Module):
    """GPT-2's embedding of this rank's positions; every rank receives all tokens.

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
            ValueError: on every rank: the ranks do not divide the sequence, it exceeds the model's
                positions, a padding mask is given, or the ranks have different tokens.
        """
        require_same_tokens(tokens, self.group)
        length = tokens.shape[-1]
        if length > self.wpe.num_embeddings:
            raise ValueError(
                f"a sequence of {length} tokens, but the model has {self.wpe.num_embeddings} "
                "positions"
            )
        own = split_sequence(tokens, self.group, order=self.order)
        place = positions(length, self.group, order=self.order, device=tokens.device)
        return self.wte(own) + self.wpe(place.unsqueeze(0))


class SequenceAttention(SharesGroups, nn.Module):
    """GPT-2's attention of this rank's positions to all.

    Args:
        attention: `transformers`' GPT2Attention, or its heads on this rank of a tensor group
            (`tensor_parallel.ParallelAttention`); its projections are used.
        attend: `ring_attention`, `gathered_attention` or `ulysses_attention`.
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
        # No check: the embedding has compared the ranks' tokens, from which all this follows.
        values = self.attend(*parts, self.group, order=self.order, scale=self.scale, check=False)
        return self.c_proj(values.transpose(1, 2).flatten(2)), None
