"""The trained model as `transformers` reads it."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import torch.distributed as dist
from safetensors import SafetensorError

from naranhi import data, models
from naranhi.checkpoint import consolidated_state_dict
from naranhi.models.hub import quiet
from naranhi.pipeline import Pipeline
from naranhi.train.usage import UsageError, naming, raise_on_all

if TYPE_CHECKING:
    from transformers import GPT2Config


def require_new(folder: str) -> None:
    """Make the folder above on rank 0; raise UsageError there if the folder has something in it.

    A mistake is told before the training, and not after it.
    """
    if dist.get_rank() == 0:
        naming("--export", lambda: _require_new(folder))


def _require_new(folder):
    if os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
        raise UsageError(f"--export {folder} is there already: name a new folder")
    above = os.path.dirname(os.path.abspath(folder))
    os.makedirs(above, exist_ok=True)
    if not os.access(above, os.W_OK):
        raise UsageError(f"--export {folder}: {above} cannot be written")


def export(
    pipeline: Pipeline, config: GPT2Config, tied: bool, tokenizer: str | None, folder: str
) -> None:
    """Write model and tokenizer on rank 0, into a folder that is there as a whole or not at all.

    Args:
        pipeline: every rank's part of the model.
        config: the model's configuration.
        tied: whether embedding and head share their weights.
        tokenizer: its name, as `data.tokenizer` takes it.
        folder: where to.

    Raises:
        UsageError: on every rank: the folder has something in it, or cannot be written.
    """
    state = consolidated_state_dict(pipeline)

    def write():
        if state is None:
            return
        part = f"{os.path.normpath(folder)}.part"
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
        try:
            with quiet():
                models.gpt2_model(state, config, tied).save_pretrained(part)
                data.tokenizer(tokenizer).save_pretrained(part)
        except SafetensorError as error:  # of a full disk, say
            raise OSError(str(error)) from error
        os.replace(part, folder)

    raise_on_all(lambda: naming("--export", write))
