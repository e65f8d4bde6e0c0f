"""Llama's layers on a sequence that is cut across ranks: `cut_sequence` inserts them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from naranhi.context_parallel.arguments import require_same_tokens
from naranhi.context_parallel.order import positions, split_sequence
from naranhi.distributed.shared_groups import SharesGroups
from naranhi.models import LlamaEmbedding, RotaryAttention


class SequenceTokens(SharesGroups, LlamaEmbedding):
    """Llama's embedding of this rank's tokens; every rank receives all tokens.

    Args:
        embedding: the first of Llama's layers.
        group: the process group; None for the default one.
        order: "plain" or "head_tail".
    """

    group: dist.ProcessGroup | None
    order: str

    def __init__(self, embedding: LlamaEmbedding, group: dist.ProcessGroup | None, order: str):
        super().__init__(embedding.wte, embedding.config)
        self.group, self.order = group, order

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden state of this rank's tokens, (batch, sequence / ranks, hidden).

        Raises:
            ValueError: on every rank: the ranks do not divide the sequence, it exceeds the model's
                positions, a padding mask is given, or the ranks have different tokens.
        """
        require_same_tokens(tokens, self.group)
        self.require_positions(tokens.shape[-1])
        return self.wte(split_sequence(tokens, self.group, order=self.order))


class SequenceRotaryAttention(SharesGroups, RotaryAttention):
    """Llama's attention of this rank's positions to all.

    Args:
        attention: the attention, or its groups of heads on this rank of a tensor group; its
            projections are used.
        attend: `ring_attention`, `gathered_attention` or `ulysses_attention`.
        group: the process group; None for the default one.
        order: "plain" or "head_tail".
    """

    group: dist.ProcessGroup | None
    order: str

    def __init__(
        self,
        attention: RotaryAttention,
        attend: Callable[..., torch.Tensor],
        group: dist.ProcessGroup | None,
        order: str,
    ):
        super().__init__(
            attention.groups,
            attention.queries,
            attention.head_size,
            attention.qkv,
            attention.proj,
            attention.rotary,
            attention.q_norm,
            attention.k_norm,
        )
        self._attend, self.group, self.order = attend, group, order

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's tokens, `length` of them."""
        whole = length * dist.get_world_size(self.group)
        return positions(whole, self.group, order=self.order, device=device)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the attention of this rank's queries to the keys of all ranks, without `mask`."""
        # No check: the embedding has compared the ranks' tokens, from which all this follows.
        return self._attend(q, k, v, self.group, order=self.order, check=False)
