"""A training in float64: rounding in float32 may decide a near-tie of a router either way."""

import contextlib

import torch
from torch import nn

from naranhi.train import trainer


@contextlib.contextmanager
def in_float64():
    """In a rank: what `train.Training` makes in the block computes in float64."""
    original = trainer.build_model_and_data

    def built(options):
        model, *others = original(options)
        nn.ModuleList(model.layers).double()
        return model, *others

    trainer.build_model_and_data = built
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        trainer.build_model_and_data = original
        torch.set_default_dtype(torch.float32)
