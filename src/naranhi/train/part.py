"""This rank's part of the model: which layers, which shards of them, and their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from naranhi import models
from naranhi.context_parallel import cut_sequence
from naranhi.distributed import Mesh, fingerprint, from_all_ranks
from naranhi.expert_parallel import MoE, add_experts, divide_experts, divided_state
from naranhi.pipeline.partition import cut
from naranhi.schedules import Schedule
from naranhi.tensor_parallel import (
    gpt2_plan,
    llama_plan,
    materialize,
    parallelize,
    vocabulary_cross_entropy,
)
from naranhi.train.build import ORDER, default_top_k

COEFFICIENT = 0.01  # of the auxiliary loss of added experts, as in Switch Transformers


def own_layers(layers: int, schedule: Schedule, balance: list[int], rank: int) -> list[int]:
    """Return the indices of the layers of a rank of the pipeline.

    Raises:
        ValueError: the balance does not fit.
    """
    parts = cut(range(layers), schedule.virtual_stages, balance)
    return [
        number
        for part, place in zip(parts, schedule.placement, strict=True)
        for number in part
        if place == rank
    ]


def divide(
    model: models.DeferredLM, own: list[int], options: argparse.Namespace, mesh: Mesh
) -> Callable[..., torch.Tensor]:
    """Split the layers, which have no values yet, over the tensor group and the context group.

    Experts come first: those of a mixture, or those added to a GPT-2 in this rank's layers; added
    ones have values at once, which the ranks of the stage draw from the same seed.

    Args:
        model: the model, in whose list of layers the split ones replace the others.
        own: the indices of this rank's layers.
        options: those of the training.
        mesh: the mesh.

    Returns:
        The loss function for the output of the last layer.
    """
    layers, loss = model.layers, models.loss
    shared = {
        "replicas": mesh.expert_replicas,
        "tensor": mesh.tensor,
        "sequence": options.sequence_parallel,
    }
    if options.mixture:
        coefficient = mixture_coefficient(model) / options.microbatches
        divide_experts(layers, mesh.expert, coefficient=coefficient, **shared)
    elif options.experts is not None:
        add_experts(
            layers,
            options.experts,
            options.top_k or default_top_k(options.experts),
            mesh.expert,
            coefficient=COEFFICIENT / options.microbatches,
            seed=options.seed,
            own=own,
            **shared,
        )
    if mesh.sizes.tensor > 1:
        plan = gpt2_plan()
        if isinstance(layers[0], models.LlamaEmbedding):
            mlp = any(isinstance(layer.mlp, models.GatedMLP) for layer in layers[1:-1])
            plan = llama_plan(head_norms=layers[1].attn.q_norm is not None, mlp=mlp)
        parallelize(layers, plan, mesh.tensor, sequence=options.sequence_parallel)
        loss = partial(vocabulary_cross_entropy, group=mesh.tensor)
    if mesh.sizes.context > 1:
        cut_sequence(layers, mesh.context, order=ORDER)
    return loss


def mixture_coefficient(model: models.DeferredLM) -> float:
    """Return the coefficient of each block's auxiliary loss, from that of the whole model.

    The configuration has one coefficient for all blocks together: see `divide_experts`. The loss
    always counts here, but in transformers only if `output_router_logits` is set.
    """
    blocks = sum(layer.sparse for layer in model.layers[1:-1])
    return model.config.router_aux_loss_coef * model.config.num_experts_per_tok / max(blocks, 1)


def fill(
    model: models.DeferredLM, own: list[int], seed: int, device: torch.device | str
) -> dict[str, str]:
    """Fill this rank's layers with values, one layer at a time; of experts, only its own.

    Args:
        model: the model, whose layers are divided.
        own: the indices of this rank's layers.
        seed: of random weights.
        device: where these layers go.

    Returns:
        {name of a weight, and the range of experts that it has: its fingerprint}, for
        `require_same_layers`.
    """
    digests = {}
    for number in own:
        shards, experts = _experts_of(model.layers[number], number)
        # Divided like the experts of a mixture; other ranks' experts are not read at all.
        values = divided_state(model.values(number, seed, experts))
        for name, tensor in values.items():
            digests[f"{name} {experts if name in shards else ''}"] = fingerprint(tensor)
        there = dict(nn.ModuleList(model.layers).named_parameters(remove_duplicate=False))
        # Where experts were added to a GPT-2, its MLP is gone.
        values = {name: tensor for name, tensor in values.items() if name in there}
        materialize(model.layers, values, shards=shards)
        del values  # before the next ones are made
        model.layers[number].to(device)
    return digests


def _experts_of(layer, number):
    """Return the names of the weights of this rank's experts in a layer, and which experts."""
    for name, module in layer.named_modules():
        if isinstance(module, MoE):
            return {f"{number}.{name}.{weight}" for weight in module.splits}, module.own
    return set(), None


def require_same_layers(digests: dict[str, str]) -> None:
    """Raise ValueError on every rank if two have different weights of a layer, or of an expert."""
    first = {}
    for rank, found in enumerate(from_all_ranks(digests)):
        for weight, digest in found.items():
            other, expected = first.setdefault(weight, (rank, digest))
            if digest != expected:
                number = weight.split(".")[0]
                raise ValueError(
                    f"rank {other} and rank {rank} have different weights of layer {number}"
                )
