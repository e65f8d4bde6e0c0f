"""Trained models of `transformers`, by name or from a folder, with errors that say what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from naranhi.models.hub import fetching, offline

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

COMPUTED = ".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"  # saved by old versions
BLOCK = re.compile(r"(?:transformer\.|model\.)?(?:h|layers)\.(\d+)\.")  # in the name of a weight


def pretrained(
    name: str, kinds: Collection[str], what: str, options: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Return a trained model with an LM head, its weights in float32.

    Args:
        name: a name on the Hugging Face hub, or a folder written by `save_pretrained`.
        kinds: what its `model_type` may be.
        what: those kinds in words, such as "a GPT-2".
        options: values that replace those of its configuration.

    Raises:
        OSError: the weights are not on disk and cannot be fetched; the error says what to do.
        ValueError: the model is of another kind, or its files are damaged or lack weights.
    """
    from transformers import AutoModelForCausalLM

    with fetching(f"weights of {name!r}", advice(name)):
        config = _config(name, what)
        if config.model_type not in kinds:
            raise ValueError(f"{name!r} is a model of the kind {config.model_type!r}, not {what}")
        require_trainable(config, repr(name))
        with readable(f"the weights of {name!r}", what):
            model, report = AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.float32, output_loading_info=True, **(options or {})
            )
    require_all_weights(name, model, report)
    return model


def configuration(name: str, what: str = "model") -> PreTrainedConfig:
    """Return the configuration of a model, by its name on the hub, a folder or a config.json.

    Args:
        name: the name or path.
        what: what is to be made of it, in words.

    Raises:
        OSError: the configuration is not on disk and cannot be fetched; the error says what to do.
        ValueError: the configuration cannot be read.
    """
    with fetching(f"configuration of {name!r}", advice(name)):
        return _config(name, what)


def _config(name, what):
    from transformers import AutoConfig

    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise FileNotFoundError("there is no config.json in it")
    with readable(f"the config.json of {name!r}", what):
        return AutoConfig.from_pretrained(name)


def require_trainable(config: PreTrainedConfig, given: str) -> None:
    """Raise ValueError for a model without blocks or attention heads, or with quantized weights.

    Args:
        config: the configuration.
        given: how the message names the configuration's source.
    """
    blocks, heads = config.num_hidden_layers, config.num_attention_heads
    if min(blocks, heads) < 1:
        raise ValueError(f"{given} has {blocks} blocks of {heads} heads")
    # With random weights, too: transformers would quantize them when a training exports its model.
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{given} has a quantization_config, and weights are trained in float32: load the "
            "model with transformers, call dequantize() and save_pretrained; or, if its weights "
            "are not quantized, delete the quantization_config from its config.json"
        )


def advice(name: str) -> str:
    """Return what to do if nothing of that name is found: a sentence or two."""
    if os.path.isdir(name):
        return "That folder was not written by save_pretrained, or not completely."
    if os.path.isfile(name):
        return "That file is no config.json."
    if name.startswith((".", "/", "~")) or name.endswith(".json"):  # not a name on the hub
        return "There is no such file or folder."
    return f"{offline(name)} Or do without: the default is a small GPT-2 with random weights."


@contextmanager
def readable(source: str, what: str) -> Iterator[None]:
    """Turn every error in the block but OSError into a ValueError with a one-line cause.

    Args:
        source: what the block reads, such as "the weights of 'folder'".
        what: what is to be made of it, such as "a GPT-2".
    """
    try:
        yield
    except OSError:  # of the hub, or of a file that is not there
        raise
    except Exception as error:  # libraries raise many types
        cause = str(error).strip().partition("\n")[0]
        kind = what.removeprefix("a ")
        raise ValueError(
            f"no {kind} can be made of {source} ({type(error).__name__}: {cause})"
        ) from error


def require_all_weights(
    name: str, model: PreTrainedModel, report: Mapping[str, Collection[str]]
) -> None:
    """Raise ValueError for missing weights, which would be random, and for unknown ones in blocks.

    Args:
        name: the model's name.
        model: the model.
        report: the names of "missing_keys" and of "unexpected_keys".
    """
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if missing := sorted({*report["missing_keys"]} - tied):
        raise ValueError(
            f"the weights of {name!r} lack {missing[0]}{_more(missing)}: they were not written by "
            "save_pretrained, or not completely, or belong to another config.json"
        )
    blocks = model.config.num_hidden_layers
    unknown = [
        key
        for key in sorted(report["unexpected_keys"])
        if BLOCK.match(key) and not key.endswith(COMPUTED)
    ]
    if further := [key for key in unknown if int(BLOCK.match(key)[1]) >= blocks]:
        raise ValueError(
            f"the weights of {name!r} have {further[0]}{_more(further)}, and its config.json has "
            f"{blocks} blocks only"
        )
    if unknown:
        raise ValueError(
            f"the weights of {name!r} have {unknown[0]}{_more(unknown)}, which its config.json "
            "does not describe: without them, a different model would be trained"
        )


def _more(names):
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
