"""Attention of Llama's kind: positions rotate queries and keys, and heads share keys and values.

Sources: Su et al., "RoFormer" (2021), for rotary positions; Ainslie et al., "GQA" (2023), for
groups of heads; Yang et al., "Qwen3 technical report" (2025), section 2, for norms of heads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from naranhi.models.masks import visible_tokens


class Rotary:
    """The angles by which a position rotates queries and keys.

    They are computed in float32, whatever the model's dtype: a buffer would be cast with the
    model, and a position in the thousands has no exact value in 16 bits.

    Args:
        frequencies: radians per position, (head size / 2,).
        scale: what the rotated values are multiplied by; 1 except for some long contexts (YaRN).
    """

    frequencies: torch.Tensor
    scale: float

    def __init__(self, frequencies: torch.Tensor, scale: float = 1.0) -> None:
        self.frequencies, self.scale = frequencies.float(), scale

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of the angles, (positions, head size / 2) each, in float32."""
        frequencies = self.frequencies.to(positions.device)
        if not frequencies.is_meta:
            self.frequencies = frequencies  # so that they are copied to a GPU once
        angles = positions[:, None].float() * frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x_i, x_(i + size / 2)) of each head by the angles of its position.

    Args:
        x: (batch, heads, sequence, head size).
        cos: (sequence, head size / 2).
        sin: (sequence, head size / 2).
    """
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions, of groups of heads that share keys and values.

    The numbers of heads and of positions come from the output of `qkv`, which may hold only this
    rank's.

    Args:
        groups: the number of heads of keys and values.
        queries: the number of heads of queries that share a head of keys and values.
        head_size: the size of a head.
        qkv: (..., hidden) to (..., groups x (queries + 2) x head size): for each group its heads of
            queries, its key and its value. So a contiguous shard has whole groups.
        proj: (..., heads x head size) to (..., hidden).
        rotary: the angles of positions.
        q_norm: a norm of each head of queries, or None.
        k_norm: a norm of each head of keys, or None.
    """

    groups: int
    queries: int
    head_size: int
    qkv: nn.Module
    proj: nn.Module
    rotary: Rotary
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(
        self,
        groups: int,
        queries: int,
        head_size: int,
        qkv: nn.Module,
        proj: nn.Module,
        rotary: Rotary,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.groups, self.queries, self.head_size, self.rotary = groups, queries, head_size, rotary
        self.qkv, self.proj, self.q_norm, self.k_norm = qkv, proj, q_norm, k_norm

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention's output, (batch, sequence, hidden); masked tokens are not seen."""
        groups = self.qkv(x).unflatten(-1, (-1, self.queries + 2, self.head_size))
        # Each is (batch, heads, sequence, head size), with fewer heads of keys and values.
        q, k, v = (
            part.flatten(2, 3).transpose(1, 2) for part in groups.split((self.queries, 1, 1), 3)
        )
        if self.q_norm is not None:
            # In the weights' dtype: autocast does not cast a norm's input, and torch does not
            # fuse a norm of two dtypes.
            q, k = (
                norm(part.to(norm.weight.dtype))
                for norm, part in ((self.q_norm, q), (self.k_norm, k))
            )
        cos, sin = self.rotary(self.positions(q.shape[2], q.device))
        q, k = (rotate(part, cos, sin).to(v.dtype) for part in (q, k))
        return self.proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions of `length` tokens."""
        return torch.arange(length, device=device)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the attention's output for each head, in the shape of q."""
        if mask is not None:
            mask = visible_tokens(q.shape[2], mask, q.device)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=True
        )
