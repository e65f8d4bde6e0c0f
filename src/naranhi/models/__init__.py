"""Models as lists of layers, and their loss."""

from naranhi.models.gpt2_blocks import (
    GPT2Block,
    GPT2Embedding,
    GPT2Head,
    gpt2,
    gpt2_config,
    gpt2_layers,
)
from naranhi.models.gpt2_model import gpt2_model
from naranhi.models.losses import IGNORE_INDEX, loss
from naranhi.models.mlp_blocks import MLPBlock, mlp
from naranhi.models.paced import Paced
from naranhi.models.transformer_layer import TransformerLayer

__all__ = [
    "IGNORE_INDEX",
    "GPT2Block",
    "GPT2Embedding",
    "GPT2Head",
    "MLPBlock",
    "Paced",
    "TransformerLayer",
    "gpt2",
    "gpt2_config",
    "gpt2_layers",
    "gpt2_model",
    "loss",
    "mlp",
]
