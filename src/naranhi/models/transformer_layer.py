"""A Transformer layer that saves for its backward what the formula counts, to the byte.

The formula is `costs.transformer_layer_bytes`, after Korthikanti et al., "Reducing activation
recomputation in large Transformer models" (2022). Torch's own operations save what the formula
says, with two exceptions: a layer norm also saves its means and deviations, and dropout on a CPU
saves more than a byte per element.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from naranhi.autograd import Dropout, recompute
from naranhi.costs.activations import RECOMPUTE


class TransformerLayer(nn.Module):
    """Causal self-attention, then an MLP: (sequence, microbatch, hidden) in, the same shape out.

    The sequence comes first, as in Megatron-LM, so q, k and v are views of the output of one
    Linear, and matrix products need no copies of them.

    Args:
        hidden: the size of the hidden state, a multiple of heads. The MLP is 4 * hidden wide.
        heads: the number of attention heads.
        dropout: the probability, in [0, 1), of each of the three dropouts.
        recompute: what is recomputed in the backward instead of being saved: "none", "full" (the
            whole layer), or "selective": the attention itself, from q, k and v to their weighted
            values, which is large to save and cheap to compute.

    Raises:
        ValueError: if hidden is not a multiple of heads, or for another value of `recompute`.
    """

    heads: int
    dropout: float
    recompute: str
    norm1: nn.LayerNorm
    norm2: nn.LayerNorm
    qkv: nn.Linear
    projection: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def __init__(
        self, hidden: int, heads: int, dropout: float = 0.1, recompute: str = "none"
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"{heads} heads do not divide a hidden size of {hidden}")
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute is one of {RECOMPUTE}, not {recompute!r}")
        self.heads, self.dropout, self.recompute = heads, dropout, recompute
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer, and recompute all of it in the backward if `recompute` is "full"."""
        if self.recompute == "full":
            return recompute(self.run_layer, x, parameters=self.parameters())
        return self.run_layer(x)

    def run_layer(self, x: torch.Tensor) -> torch.Tensor:
        """Run the attention, then the MLP."""
        # Norms are recomputed from their input, because the formula counts no means or deviations.
        q, k, v = self._split_heads(self.qkv(recompute(self.norm1, x)))
        if self.recompute == "selective":
            values = recompute(self.attention, q, k, v)
        else:
            values = self.attention(q, k, v)
        x = x + self.drop(self.projection(values.transpose(0, 1).reshape(x.shape)))
        inner = F.gelu(self.up(recompute(self.norm2, x)))
        return x + self.drop(self.down(inner))

    def _split_heads(self, qkv):
        """Return three views of shape (microbatch * heads, sequence, hidden / heads)."""
        sequence, microbatch, width = qkv.shape
        qkv = qkv.view(sequence, microbatch * self.heads, width // self.heads)
        return qkv.transpose(0, 1).chunk(3, dim=-1)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the weighted values; all are (microbatch * heads, sequence, hidden / heads)."""
        sequence, size = q.shape[1:]
        future = torch.full((sequence, sequence), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=size**-0.5)
        return torch.bmm(self.drop(scores.softmax(-1)), v)

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        """Return x after dropout, if the layer is in training mode."""
        return Dropout.apply(x, self.dropout) if self.training else x
