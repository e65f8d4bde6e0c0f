"""GPT-2's layers as a model of `transformers` again: the inverse of `gpt2_layers`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from naranhi.models.gpt2_blocks import gpt2_layers

if TYPE_CHECKING:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel


def gpt2_model(
    state: Mapping[str, torch.Tensor], config: GPT2Config, tied: bool = True
) -> GPT2LMHeadModel:
    """Return a `transformers.GPT2LMHeadModel` with the weights of layers that `gpt2` has returned.

    Args:
        state: the layers' state_dict, `nn.ModuleList(layers).state_dict()`, or what
            `checkpoint.consolidated_state_dict` returns; copied.
        config: the model's configuration, which remains as it is.
        tied: whether embedding and head are one parameter, as for `gpt2`.

    Raises:
        ValueError: the state is not that of such layers; it names the first that is missing, left
            over, or of another shape.
    """
    from transformers import GPT2LMHeadModel

    config = copy.deepcopy(config)
    config.tie_word_embeddings = tied
    model = GPT2LMHeadModel(config)
    layers = nn.ModuleList(gpt2_layers(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in layers.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if tied:  # once, under its first name, is enough
        given.setdefault(f"{len(layers) - 1}.lm_head.weight", given.get("0.wte.weight"))
    for name in (*shapes, *given):
        if shapes.get(name) != given.get(name):
            raise ValueError(
                f"{name} has shape {given.get(name)} in the state, and {shapes.get(name)} in a "
                "GPT-2 of this configuration (None: it is not there)"
            )
    layers.load_state_dict(state, strict=False)
    return model
