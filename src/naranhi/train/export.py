"""The trained model as `transformers` reads it."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch.distributed as dist

from naranhi import data, models
from naranhi.checkpoint import consolidated_state_dict
from naranhi.expert_parallel import undivided_state
from naranhi.models.hub import quiet
from naranhi.pipeline import Pipeline
from naranhi.train.build import tokenizer_of
from naranhi.train.usage import UsageError, naming, raise_on_all

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LENGTH = 10**9  # tokens; a tokenizer without a limit says more


def require_new(options: argparse.Namespace) -> None:
    """Raise UsageError on rank 0 unless the folder of `--export` can be written there.

    So a mistake is reported before the training. Parent folders are created.
    """
    if dist.get_rank() == 0:
        naming("--export", lambda: _require_new(options))


def _require_new(options):
    folder = _real(options.export)
    if folder == Path.cwd():
        raise UsageError(f"--export {options.export} is the current folder: name a new one in it")
    if folder.is_mount():
        raise UsageError(f"--export {options.export} is a mount point: name a folder in it")
    if os.path.lexists(folder) and not (folder.is_dir() and not os.listdir(folder)):
        raise UsageError(f"--export {options.export} is there already: name a new folder")
    for option, path in (("--save", options.save), ("--log-file", options.log)):
        if path is not None and _real(path).is_relative_to(folder):
            raise UsageError(
                f"--export {options.export} would have {option} {path} in it: name another folder"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _beside(folder).rmdir()


def export(
    pipeline: Pipeline, config: PreTrainedConfig, tied: bool, options: argparse.Namespace
) -> None:
    """Write model and tokenizer into the folder of `--export`, on rank 0, all of it or nothing.

    Args:
        pipeline: every rank's part of the model.
        config: the model's configuration.
        tied: whether embedding and head are one parameter.
        options: those of the training.

    Raises:
        UsageError: on every rank: the folder is not empty, or cannot be written.
    """
    state, folder = consolidated_state_dict(pipeline), _real(options.export)

    def write(part):
        tokenizer = data.tokenizer(tokenizer_of(options))
        model = models.transformers_model(undivided_state(state), config, tied)
        _describe(model, tokenizer, options)
        model.save_pretrained(part)
        if tokenizer.model_max_length > LENGTH:
            tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(part)
        part.replace(folder)

    raise_on_all(lambda: state and _or_nothing(write, folder, options))


def _describe(model, tokenizer, options):
    """Restore settings of the model's source that training does not use: dropout, generation."""
    from transformers import GenerationConfig

    name = options.model
    if name is None:  # weights that began at random: the tokenizer says what tokens mean
        for config in model.config, model.generation_config:
            config.eos_token_id = tokenizer.eos_token_id
            config.bos_token_id = tokenizer.bos_token_id
            config.pad_token_id = None
    if name is None and options.config is None:
        return
    source = models.configuration(name or options.config)
    for kind in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if hasattr(source, kind):
            setattr(model.config, kind, getattr(source, kind))
    if name is None:
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(name)
    except OSError:  # the source has no generation config
        model.generation_config = GenerationConfig.from_model_config(model.config)


def _or_nothing(write: Callable[[Path], None], folder, options):
    """Call `write(path of a new folder)`; on failure remove the folder and raise UsageError.

    Several libraries write, and each raises different kinds of errors.
    """
    part = naming("--export", lambda: _beside(folder))
    try:
        with quiet():
            write(part)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        advice = ": run again with --resume and another --export" if options.save else ""
        raise UsageError(f"--export {options.export} is not written ({cause}){advice}") from error


def _real(path):
    return Path(os.path.realpath(path))


def _beside(folder):
    """Make an empty folder that nobody else has, on the same file system, and return its path."""
    path = folder.with_name(f"{folder.name}.{uuid4().hex[:8]}")
    path.mkdir()
    return path
