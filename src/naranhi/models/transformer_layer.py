"""A Transformer layer that keeps for its backward what the formula counts, to the byte.

The formula is `costs.transformer_layer_bytes`, after Korthikanti et al., "Reducing
activation recomputation in large Transformer models" (2022). Torch's own operations keep what it
says but for two: a layer norm keeps its means and deviations too, and dropout on a CPU keeps more
than a byte an element.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from naranhi.autograd import Dropout, recompute
from naranhi.costs.activations import RECOMPUTE


class TransformerLayer(nn.Module):
    """Causal self-attention, then an MLP: (sequence, microbatch, hidden) in, the same shape out.

    hidden, heads: whole numbers, hidden a multiple of heads. The MLP is 4 * hidden wide.
    dropout: the probability, in [0, 1), of each of the three dropouts.
    recompute: what is computed again in the backward instead of being kept. "selective" is the
    attention itself, from q, k and v to their weighted values: large to keep, cheap to compute.

    The sequence comes first, as in Megatron-LM: so q, k and v are views of what one Linear put
    out, which matrix products take as they are.

    Raises ValueError when hidden is not a multiple of heads, or for another word in `recompute`.
    """

    def __init__(self, hidden, heads, dropout=0.1, recompute="none"):
        super().__init__()
        if hidden % heads:
            raise ValueError(f"{heads} heads do not divide a hidden size of {hidden}")
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute is one of {RECOMPUTE}, not {recompute!r}")
        self.heads, self.dropout, self.recompute = heads, dropout, recompute
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        if self.recompute == "full":
            return recompute(self.run_layer, x, parameters=self.parameters())
        return self.run_layer(x)

    def run_layer(self, x):
        # Norms are recomputed from their input alone, as the formula counts no means or deviations.
        q, k, v = self._split_heads(self.qkv(recompute(self.norm1, x)))
        if self.recompute == "selective":
            values = recompute(self.attention, q, k, v)
        else:
            values = self.attention(q, k, v)
        x = x + self.drop(self.projection(values.transpose(0, 1).reshape(x.shape)))
        inner = F.gelu(self.up(recompute(self.norm2, x)))
        return x + self.drop(self.down(inner))

    def _split_heads(self, qkv):
        """Three views of (microbatch * heads, sequence, hidden / heads)."""
        sequence, microbatch, width = qkv.shape
        qkv = qkv.view(sequence, microbatch * self.heads, width // self.heads)
        return qkv.transpose(0, 1).chunk(3, dim=-1)

    def attention(self, q, k, v):
        sequence, size = q.shape[1:]
        future = torch.full((sequence, sequence), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=size**-0.5)
        return torch.bmm(self.drop(scores.softmax(-1)), v)

    def drop(self, x):
        return Dropout.apply(x, self.dropout) if self.training else x
