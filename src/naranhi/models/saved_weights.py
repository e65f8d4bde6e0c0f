"""The weights of a trained model, read from its files one tensor at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from naranhi.models.hub import fetching
from naranhi.models.pretrained import advice, readable, require_all_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLES, SAMPLE = 64, 2**14  # how much of each file a fingerprint reads: the number, and bytes


class SavedWeights:
    """The weights in the safetensors files of a model; nothing but their headers is read at first.

    Args:
        name: a name on the Hugging Face hub, or a folder written by `save_pretrained`.
        model: the model of `transformers`, which may be on the meta device.
        shapes: {name in the files: shape} of all its weights.
        what: the kind of model, in words, such as "a GPT-2".

    Raises:
        OSError: the files are not on disk and cannot be fetched; the error says what to do.
        ValueError: the files are damaged, not safetensors, or differ from the model's weights.
    """

    def __init__(
        self, name: str, model: PreTrainedModel, shapes: Mapping[str, list[int]], what: str
    ) -> None:
        from safetensors import safe_open

        prefix, unexpected, self._found = f"{model.base_model_prefix}.", [], {}
        with (
            fetching(f"weights of {name!r}", advice(name)),
            readable(f"the weights of {name!r}", what),
        ):
            self._paths = _files(name)
            for path in self._paths:
                file = safe_open(path, "pt")
                keys = file.keys()
                for key in keys:
                    # A model saved without its head has no prefix.
                    theirs = key if key in shapes else prefix + key
                    if theirs not in shapes:
                        unexpected.append(key)
                        continue
                    shape = file.get_slice(key).get_shape()
                    if shape != shapes[theirs]:
                        raise ValueError(f"{key} is {shape}, not {shapes[theirs]}")
                    self._found[theirs] = file, key
        if fused := [key for key in unexpected if key.endswith("experts.gate_up_proj")]:
            raise ValueError(
                f"the weights of {name!r} have all experts of a block in one tensor ({fused[0]}): "
                "save the model by save_pretrained(save_original_format=True), its default"
            )
        if model.config.tie_word_embeddings:
            self._tie(name, model)
        report = {"missing_keys": shapes.keys() - self._found, "unexpected_keys": unexpected}
        require_all_weights(name, model, report)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a copy of the weight of that name in the files, in float32."""
        file, key = self._found[name]
        # What safetensors returns is the file, mapped into memory: the same each time.
        return file.get_tensor(key).to(torch.float32, copy=True)

    def fingerprint(self) -> torch.Tensor:
        """Return a digest of the files' sizes, and of a sample of their contents.

        Training changes nearly all weights, so a sample tells one model's files from another's.
        """
        digest = hashlib.sha256()
        for path in self._paths:
            size = os.path.getsize(path)
            digest.update(f"{size} ".encode())
            with open(path, "rb") as file:
                for number in range(SAMPLES):
                    file.seek(number * size // SAMPLES)
                    digest.update(file.read(SAMPLE))
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)

    def _tie(self, name, model):
        """Read the embedding from the head if the files lack it; refuse a head that differs.

        Raises:
            ValueError: they differ.
        """
        weight, head = model.get_input_embeddings().weight, "lm_head.weight"
        named = model.named_parameters()
        embedding = next(theirs for theirs, param in named if param is weight)
        if embedding not in self._found and head in self._found:
            self._found[embedding] = self._found[head]
        if {embedding, head} <= self._found.keys() and not torch.equal(self[embedding], self[head]):
            raise ValueError(
                f"the weights of {name!r} have a head that is not the embedding, and its "
                'config.json says that it is: set "tie_word_embeddings" to false there'
            )


def _files(name):
    """Return the paths of a model's files, fetched if necessary."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

    if_there = {"_raise_exceptions_for_missing_entries": False}  # but raises if the hub is down
    if single := cached_file(name, SAFE_WEIGHTS_NAME, **if_there):
        return [single]
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **if_there)
    if index is None:
        raise ValueError(
            f"there is neither {SAFE_WEIGHTS_NAME} nor its index: if the weights have a different "
            "format, load them with transformers, then call save_pretrained"
        )
    with open(index) as file:
        parts = sorted({*json.load(file)["weight_map"].values()})
    return [cached_file(name, part) for part in parts]
