"""A deep MLP as a list of layers, each with one tensor in and one tensor out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class MLPBlock(nn.Module):
    """x + down(gelu(up(x))): (..., hidden) in and out.

    Args:
        hidden: the size of the input and the output.
        inner: the size in between.
    """

    up: nn.Linear
    down: nn.Linear

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + down(gelu(up(x)))."""
        return x + self.down(F.gelu(self.up(x)))


def mlp(blocks: int, hidden: int, inner: int | None = None) -> list[nn.Module]:
    """Return `blocks` layers of hidden -> inner -> hidden.

    This is a Transformer without its attention, and an honest stand-in for a Transformer if only
    the arithmetic and the messages matter. Weights are drawn from torch's generator.

    Args:
        blocks: the number of layers.
        hidden: the size of a layer's input and output.
        inner: the size in between; by default 4 * hidden.

    Raises:
        ValueError: for a number below 1.
    """
    inner = 4 * hidden if inner is None else inner
    if min(blocks, hidden, inner) < 1:
        raise ValueError(f"blocks, hidden and inner are at least 1, not {blocks, hidden, inner}")
    return [MLPBlock(hidden, inner) for _ in range(blocks)]
