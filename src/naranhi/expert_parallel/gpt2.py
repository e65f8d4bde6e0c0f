"""GPT-2 with mixtures of experts in place of the MLPs of some blocks.

Source: Lepikhin et al., "GShard" (2021), section 2.2, for experts in every second block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from naranhi.expert_parallel.experts_mlp import in_place_of_mlp, require_copies_on
from naranhi.expert_parallel.moe import MoE
from naranhi.models import GPT2Block, seed_of


def add_experts(
    layers: Sequence[nn.Module],
    experts: int,
    top_k: int,
    group: dist.ProcessGroup | None = None,
    *,
    every: int = 2,
    capacity_factor: float | None = None,
    replicas: dist.ProcessGroup | None = None,
    coefficient: float | None = None,
    tensor: dist.ProcessGroup | None = None,
    sequence: bool = False,
    seed: int | None = None,
    own: Collection[int] | None = None,
) -> list[nn.Module]:
    """Replace every second MLP of `models.gpt2` by experts, in place, and return the layers.

    An expert is as wide as the MLP was. The MLP's weights and its dropout are lost.

    Args:
        layers: the layers of `models.gpt2`, the same on every rank.
        experts: see `MoE`.
        top_k: see `MoE`.
        group: see `MoE`.
        every: 2 for blocks 2, 4, 6, ...; 1 for all blocks. (`tensor_parallel.gpt2_plan` has an
            entry for MLPs: leave it out of the plan if no block keeps one.)
        capacity_factor: see `MoE`.
        replicas: see `MoE`.
        coefficient: see `ExpertsMLP`.
        tensor: the tensor group over which `tensor_parallel.parallelize` will split what is left.
            Its ranks have copies of the experts, and different tokens: `replicas` must have them.
            With `sequence` or without, each of its ranks has the routers' gradients of its tokens
            only: call `tensor_parallel.sum_sequence_gradients` once per step.
        sequence: whether `parallelize` will split the activations, too.
        seed: gives each block a seed by its number, so that a block's experts do not depend on
            which other blocks are drawn; None for torch's generator.
        own: the indices of the layers that this rank will keep; only these get experts. All ranks
            of the group, and of `replicas`, have to name the same ones. None for all layers.

    Raises:
        ValueError: no block would get experts, `replicas` lacks ranks of `tensor`, or see `MoE`.
    """
    blocks = [n for n, layer in enumerate(layers) if isinstance(layer, GPT2Block)]
    blocks = blocks[every - 1 :: every]
    if not blocks:
        raise ValueError(f"every={every} leaves no block for experts among {len(layers)} layers")
    tensor = require_copies_on(tensor, replicas)
    for number in blocks if own is None else [number for number in blocks if number in own]:
        layer = layers[number]
        hidden = layer.block.ln_2.normalized_shape[0]
        width = layer.block.mlp.c_fc.weight.shape[1]
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.default_generator.manual_seed(seed_of(seed, number, "experts"))
            moe = MoE(hidden, width, experts, top_k, group, capacity_factor, replicas=replicas)
        layer.block.mlp = in_place_of_mlp(moe, coefficient, tensor, sequence)
    return list(layers)
