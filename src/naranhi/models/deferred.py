"""A language model that is built without values, which each rank then makes for its layers only.

A model that is cut because it does not fit on one rank cannot be built whole on a rank, either. So
its layers are built on torch's meta device, where a tensor has a shape and no memory, and are cut
there. Then a rank makes the values of its layers, one whole layer at a time.

Each layer is drawn with its own seed. So its values are the same on any rank, and no rank draws
other ranks' layers (except a rank with a tied head, which draws the embedding as well).
"""

from __future__ import annotations

import copy
import os
import random
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from naranhi.models.causal_lm import causal_lm, is_gpt2, require_kind
from naranhi.models.gpt2_blocks import DROPOUTS, gpt2_config
from naranhi.models.pretrained import configuration, readable, require_trainable
from naranhi.models.saved_weights import SavedWeights
from naranhi.models.weight_names import joined, parted, sources

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class DeferredLM:
    """A language model as layers on the meta device, and the values of each layer on request.

        model = DeferredLM(config)
        layers = parallelize(model.layers, gpt2_plan(), group)  # mixtures first: divide_experts
        for number in own:
            materialize(layers, model.values(number, seed=0))  # of mixtures: divided_state(...)

    Args:
        name_or_config: None for a small GPT-2, or a configuration, with random weights; or, for
            trained weights, a name on the Hugging Face hub or a folder written by
            `save_pretrained`, in which they are safetensors.
        tied: whether embedding and head stay one parameter, if the model has one.
        dropout: a probability; by default the configuration's. Only GPT-2 has dropout.

    Attributes:
        layers: as `causal_lm` returns them, without values.
        config: the model's configuration.

    Raises:
        OSError: if the weights are not on disk and cannot be fetched; the error says what to do.
        ValueError: if the model is of another kind, or `dropout` is given and it has none; or its
            files are damaged, not safetensors, or have different weights.
    """

    layers: list[nn.Module]
    config: PreTrainedConfig

    def __init__(
        self,
        name_or_config: str | os.PathLike[str] | PreTrainedConfig | None = None,
        tied: bool = True,
        dropout: float | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        name, given, config = None, "the configuration", name_or_config
        if isinstance(name_or_config, str | os.PathLike):
            name = os.fspath(name_or_config)
            config, given = configuration(name), repr(name)
        self.config = gpt2_config() if config is None else copy.deepcopy(config)
        require_kind(self.config, given, dropout)
        require_trainable(self.config, given)
        if dropout is not None and is_gpt2(self.config):
            self.config.update(dict.fromkeys(DROPOUTS, dropout))
        with torch.device("meta"):
            with readable(given, "a model"):
                self._model = AutoModelForCausalLM.from_config(self.config)
            self.layers = causal_lm(self.config, tied)
        self._whole = copy.deepcopy(self.layers)
        self._saved = None
        if name is not None:
            self._saved = SavedWeights(name, self._model, self._shapes(), "a model")

    def values(
        self, number: int, seed: int = 0, experts: range | None = None
    ) -> dict[str, torch.Tensor]:
        """Return a layer's whole weights, {name in the state_dict of all layers: tensor}.

        Torch's generator is left as it was.

        Args:
            number: the index of the layer.
            seed: the seed of random weights.
            experts: which experts to return if the layer has a mixture; all if None. Random
                experts are all drawn nevertheless.
        """
        layer = self._whole[number]
        make = partial(self._read, experts=experts)
        if not self._saved:
            make = partial(self._drawn, experts=experts, seed=seed)
        if not (self.config.tie_word_embeddings and hasattr(layer, "lm_head")):
            return make(number)
        # The head is the embedding, or begins as a copy of it if the layers are untied.
        state = {}
        for name, _ in layer.named_children():
            state |= make(number, name) if name != "lm_head" else {}
        return state | {f"{number}.lm_head.weight": make(0, "wte")["0.wte.weight"]}

    def fingerprint(self) -> torch.Tensor:
        """Return a digest of a sample of the files; ranks that read the same files agree on it."""
        return self._saved.fingerprint() if self._saved else torch.zeros(0)

    def _shapes(self):
        """Return {name in the files: shape} of all weights."""
        shapes = {}
        for name, tensor in nn.ModuleList(self._whole).state_dict().items():
            parts = parted(name, tensor, self.config)
            for theirs, part in zip(sources(name, self.config), parts, strict=True):
                shapes[theirs] = list(part.shape)
        return shapes

    def _read(self, number, part="", experts=None):
        """Return the values of a layer, or of a part of it, from the files."""
        state = {}
        for own in self._whole[number].get_submodule(part).state_dict():
            name = ".".join(filter(None, (str(number), part, own)))
            parts = [self._saved[theirs] for theirs in sources(name, self.config, experts)]
            state[name] = joined(name, parts, self.config)
        return state

    def _drawn(self, number, part="", experts=None, seed=0):
        """Return random values of a layer, or of `part`, which must be the part drawn first."""
        layer = copy.deepcopy(self._whole[number].get_submodule(part))
        for module in layer.modules():
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty_like(param, device="cpu")))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(seed, number))  # not a GPU's
            layer.apply(self._model._init_weights)  # as transformers does with a new model
        some = slice(None) if experts is None else slice(experts.start, experts.stop)
        return {
            ".".join(filter(None, (str(number), part, name))): (
                tensor[some].clone() if name.startswith("mlp.experts.") else tensor
            )
            for name, tensor in layer.state_dict().items()
        }


def seed_of(*parts: object) -> int:
    """Return a seed for `torch.manual_seed`, different for different parts."""
    return random.Random("/".join(map(str, parts))).getrandbits(63)
