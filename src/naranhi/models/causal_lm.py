"""A language model of any supported kind as a list of layers, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from naranhi.models.gpt2_blocks import gpt2
from naranhi.models.gpt2_model import gpt2_model
from naranhi.models.llama_model import llama_model
from naranhi.models.llama_weights import KIND, KINDS, llama
from naranhi.models.pretrained import configuration
from naranhi.models.weight_names import EXPERTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def causal_lm(
    name_or_config: str | os.PathLike[str] | PreTrainedConfig | None = None,
    tied: bool = True,
    dropout: float | None = None,
) -> list[nn.Module]:
    """Return GPT-2, or a model of Llama's kind, as a list of layers: see `gpt2` and `llama`.

    Args:
        name_or_config: None for a small GPT-2, or a configuration, with random weights from
            torch's generator; or, for trained weights, a name on the Hugging Face hub or a folder
            written by `save_pretrained`.
        tied: whether embedding and head stay one parameter, if the model has one.
        dropout: a probability; by default the configuration's. Only GPT-2 has dropout.

    Raises:
        OSError: if the weights are not on disk and cannot be fetched; the error says what to do.
        ValueError: if the model is of another kind, or `dropout` is given and the model has none.
    """
    config, given = name_or_config, "the configuration"
    if isinstance(name_or_config, str | os.PathLike):
        config, given = configuration(os.fspath(name_or_config)), repr(os.fspath(name_or_config))
    if config is None:
        return gpt2(None, tied, dropout)
    require_kind(config, given, dropout)
    return gpt2(name_or_config, tied, dropout) if is_gpt2(config) else llama(name_or_config, tied)


def is_gpt2(config: PreTrainedConfig) -> bool:
    """Return whether this is the configuration of a GPT-2."""
    return config.model_type == "gpt2"


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return whether this is the configuration of a model with experts in some block."""
    if config.model_type not in EXPERTS or not config.num_experts:
        return False
    dense, step = getattr(config, "mlp_only_layers", ()), getattr(config, "decoder_sparse_step", 1)
    blocks = range(config.num_hidden_layers)
    return any(block not in dense and (block + 1) % step == 0 for block in blocks)


def require_kind(config: PreTrainedConfig, given: str, dropout: float | None = None) -> None:
    """Raise ValueError for a configuration that `causal_lm` does not support.

    Args:
        config: the configuration.
        given: how the message names the configuration's source.
        dropout: as in `causal_lm`.
    """
    if is_gpt2(config):
        return
    if config.model_type not in KINDS:
        raise ValueError(
            f"{given} is a model of the kind {config.model_type!r}, neither a GPT-2 nor {KIND}"
        )
    if dropout:
        raise ValueError(
            f"{given} is a {config.model_type}, which has no dropout: do not set it to {dropout}"
        )


def transformers_model(
    state: Mapping[str, torch.Tensor], config: PreTrainedConfig, tied: bool
) -> PreTrainedModel:
    """Return the model of `transformers` whose layers have this state.

    Args:
        state: see `gpt2_model`.
        config: the model's configuration, which determines the kind of model.
        tied: whether embedding and head are one parameter.

    Raises:
        ValueError: the state is not that of such layers.
    """
    return (gpt2_model if config.model_type == "gpt2" else llama_model)(state, config, tied)
