"""GPT-2 with mixtures of experts in place of the MLPs of some blocks.

Source: Lepikhin et al., "GShard" (2021), section 2.2, for experts in every second block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from naranhi.expert_parallel.moe import MoE
from naranhi.models import GPT2Block


class ExpertsMLP(nn.Module):
    """A mixture of experts where a block has its MLP.

    Args:
        moe: the mixture of experts.

    Attributes:
        auxiliary: the auxiliary loss of the last forward.
    """

    moe: MoE
    auxiliary: torch.Tensor | None

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe, self.auxiliary = moe, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of all tokens, (..., hidden) in and out."""
        output, self.auxiliary = self.moe(x.flatten(0, -2))
        return output.view_as(x)


def add_experts(
    layers: Sequence[nn.Module],
    experts: int,
    top_k: int,
    group: dist.ProcessGroup | None = None,
    *,
    every: int = 2,
    capacity_factor: float | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> list[nn.Module]:
    """Replace the MLP of every second block of `models.gpt2`, in place, and return the layers.

    An expert is as wide as the MLP was, 4 x hidden. The MLP's weights and its dropout are lost.

    Args:
        layers: the layers of `models.gpt2`, the same on every rank.
        experts: see `MoE`.
        top_k: see `MoE`.
        group: see `MoE`.
        every: 2 for blocks 2, 4, 6, ...; 1 for all blocks.
        capacity_factor: see `MoE`.
        replicas: see `MoE`.

    Raises:
        ValueError: no block would get experts, or see `MoE`.
    """
    blocks = [layer for layer in layers if isinstance(layer, GPT2Block)][every - 1 :: every]
    if not blocks:
        raise ValueError(f"among {len(layers)} layers there is no block for experts, every {every}")
    for layer in blocks:
        hidden = layer.block.ln_2.normalized_shape[0]
        moe = MoE(hidden, 4 * hidden, experts, top_k, group, capacity_factor, replicas=replicas)
        layer.block.mlp = ExpertsMLP(moe)
    return list(layers)


def auxiliary_loss(model: nn.Module) -> torch.Tensor:
    """Return the sum of the auxiliary losses of the last forward, the same on every rank.

    Args:
        model: a module made of the layers that `add_experts` returned.

    Raises:
        RuntimeError: there has been no forward, or no layer has experts.
    """
    losses = [one.auxiliary for one in model.modules() if isinstance(one, ExpertsMLP)]
    if not losses or None in losses:
        raise RuntimeError("no auxiliary loss: the model has no experts, or has had no forward")
    return torch.stack(losses).sum()
