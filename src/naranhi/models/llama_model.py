"""Llama's layers as a model of `transformers` again: the inverse of `llama_layers`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from naranhi.models.gpt2_model import require_state
from naranhi.models.hub import quiet
from naranhi.models.llama_weights import llama_layers
from naranhi.models.weight_names import parted, sources

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def llama_model(
    state: Mapping[str, torch.Tensor], config: PreTrainedConfig, tied: bool | None = None
) -> PreTrainedModel:
    """Return a model of `transformers` with the weights of layers that `llama` has returned.

    The model is in evaluation mode. It shares the state's memory, except for queries, keys and
    values and for experts, which are copies. Torch's generator is left as it was.

    Args:
        state: the layers' state_dict, `nn.ModuleList(layers).state_dict()`, or what
            `checkpoint.consolidated_state_dict` returns.
        config: the model's configuration, which is not changed.
        tied: whether embedding and head are one parameter; by default as the configuration says.

    Raises:
        ValueError: the state is not that of such layers. The error names the first tensor that is
            missing, left over, or of another shape, or says that embedding and head differ.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if tied is not None:
        config.tie_word_embeddings = tied
    with torch.device("meta"):  # where nothing is drawn
        empty = AutoModelForCausalLM.from_config(config)
    layers = nn.ModuleList(llama_layers(empty)).state_dict()
    embedding, head = "0.wte.weight", f"{config.num_hidden_layers + 1}.lm_head.weight"
    require_state(state, layers, embedding if config.tie_word_embeddings else None, head, "Llama")
    weights = {}
    for name, tensor in state.items():
        parts = parted(name, tensor, config)
        weights.update(zip(sources(name, config), parts, strict=True))
    dtype = state[embedding].dtype  # and not what the configuration says
    with quiet(), torch.random.fork_rng(devices=[]):
        return type(empty).from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
