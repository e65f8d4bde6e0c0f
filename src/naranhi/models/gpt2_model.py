"""GPT-2's layers as a model of `transformers` again: the inverse of `gpt2_layers`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from naranhi.models.gpt2_blocks import gpt2_layers
from naranhi.models.hub import quiet
from naranhi.models.weight_names import sources

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel


def gpt2_model(
    state: Mapping[str, torch.Tensor], config: GPT2Config, tied: bool = True
) -> GPT2LMHeadModel:
    """Return a `transformers.GPT2LMHeadModel` with the weights of layers that `gpt2` has returned.

    The model is in evaluation mode, and shares the state's memory. Torch's generator is left as
    it was.

    Args:
        state: the layers' state_dict, `nn.ModuleList(layers).state_dict()`, or what
            `checkpoint.consolidated_state_dict` returns.
        config: the model's configuration, which is not changed.
        tied: whether embedding and head are one parameter.

    Raises:
        ValueError: the state is not that of such layers. The error names the first tensor that is
            missing, left over, or of another shape, or says that embedding and head differ.
    """
    from transformers import GPT2LMHeadModel

    config = copy.deepcopy(config)
    config.tie_word_embeddings = tied
    with torch.device("meta"):  # where nothing is drawn
        empty = GPT2LMHeadModel(config)
    layers = nn.ModuleList(gpt2_layers(empty)).state_dict()
    embedding, head = "0.wte.weight", f"{config.n_layer + 1}.lm_head.weight"
    require_state(state, layers, embedding if tied else None, head, "GPT-2")
    weights = {sources(name, config)[0]: tensor for name, tensor in state.items()}
    dtype = state[embedding].dtype  # and not what the configuration says
    with quiet(), torch.random.fork_rng(devices=[]):
        return GPT2LMHeadModel.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)


def require_state(
    state: Mapping[str, torch.Tensor],
    layers: Mapping[str, torch.Tensor],
    embedding: str | None,
    head: str,
    what: str,
) -> None:
    """Raise ValueError unless a state has the tensors of these layers.

    Args:
        state: the state; it may lack the head of a model that is tied.
        layers: {name: a tensor of the shape that it should have}.
        embedding: the name of the embedding that is also the head; None if they are separate.
        head: the name of the head.
        what: the kind of model, for the error.

    Raises:
        ValueError: it names the first tensor that is missing, left over, or of another shape, or
            says that embedding and head differ.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in layers.items()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if embedding is not None:  # once, under its first name, is enough
        given.setdefault(head, given.get(embedding))
    for name in (*shapes, *given):
        if shapes.get(name) != given.get(name):
            raise ValueError(
                f"{name} has shape {given.get(name)} in the state, and {shapes.get(name)} in a "
                f"{what} of this configuration (None: it is not there)"
            )
    if embedding is not None and head in state and not torch.equal(state[head], state[embedding]):
        raise ValueError(f"{head} is not {embedding}: the state is of untied layers (tied=False)")
