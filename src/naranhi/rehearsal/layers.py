"""A Transformer layer that is cut over tensor and context parallel ranks, at a given pace.

Its arithmetic is real, and so are its messages; a rank that has a quarter of a layer waits for a
quarter of the layer's time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from naranhi.context_parallel import ring_attention
from naranhi.models import Paced
from naranhi.rehearsal.meshes import Groups
from naranhi.tensor_parallel.mappings import copy_to_group, reduce_from_group, stays


class Pace(NamedTuple):
    """Seconds of a whole layer, for one sequence.

    Attributes:
        forward: Of a forward.
        backward: Of a backward.
        attention: The fraction of both that is attention.
    """

    forward: float
    backward: float
    attention: float = 1 / 3

    def of(self, part: float) -> tuple[float, float]:
        """Return the seconds of a part of a layer, forward and backward."""
        return part * self.forward, part * self.backward


class RehearsalLayer(nn.Module):
    """Attention and MLP, each between a copy and a sum over the tensor parallel group.

    Args:
        hidden: The hidden size.
        heads: The attention heads of the whole layer.
        groups: This rank's groups.
        pace: The pace of the whole layer, for one sequence.
        microbatch: Sequences of a micro-batch.
    """

    group: dist.ProcessGroup
    attention: Paced
    mlp: Paced

    def __init__(
        self, hidden: int, heads: int, groups: Groups, *, pace: Pace, microbatch: int = 1
    ) -> None:
        super().__init__()
        tp = dist.get_world_size(groups.tensor)
        part = microbatch / tp / dist.get_world_size(groups.context)
        self.group = groups.tensor
        attention = Attention(hidden, heads // tp, hidden // heads, groups.context)
        up, down = (
            nn.Linear(hidden, 4 * hidden // tp, False),
            nn.Linear(4 * hidden // tp, hidden, False),
        )
        mlp = nn.Sequential(nn.RMSNorm(hidden), up, nn.GELU(), down)
        self.attention = Paced(attention, *pace.of(part * pace.attention))
        self.mlp = Paced(mlp, *pace.of(part * (1 - pace.attention)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for (sequences, tokens of this rank, hidden)."""
        for half in (self.attention, self.mlp):
            x = x + reduce_from_group(half(copy_to_group(x, self.group)), self.group)
        return x


class Attention(nn.Module):
    """Attention of some heads, whose keys and values go round the context parallel group.

    Args:
        hidden: The hidden size.
        heads: The heads of this rank.
        head_dim: The elements of a head.
        group: The ranks that share the sequence.
    """

    heads: int
    group: dist.ProcessGroup | None
    norm: nn.RMSNorm
    qkv: nn.Linear
    projection: nn.Linear

    def __init__(
        self, hidden: int, heads: int, head_dim: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        self.heads, self.group = heads, group
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * heads * head_dim, False)
        self.projection = nn.Linear(heads * head_dim, hidden, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum over heads, before it is summed."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if stays(x, self.group):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = ring_attention(q, k, v, self.group, check=False)
        return self.projection(mixed.transpose(1, 2).flatten(2))
