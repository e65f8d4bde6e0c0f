"""Models as lists of layers, and their loss."""

from naranhi.models.causal_lm import causal_lm, is_mixture, transformers_model
from naranhi.models.deferred import DeferredLM, seed_of
from naranhi.models.gpt2_blocks import (
    GPT2Block,
    GPT2Embedding,
    GPT2Head,
    gpt2,
    gpt2_config,
    gpt2_layers,
)
from naranhi.models.gpt2_model import gpt2_model
from naranhi.models.llama_blocks import GatedMLP, LlamaBlock, LlamaEmbedding, LlamaHead
from naranhi.models.llama_model import llama_model
from naranhi.models.llama_weights import llama, llama_config, llama_layers
from naranhi.models.losses import IGNORE_INDEX, loss
from naranhi.models.mlp_blocks import MLPBlock, mlp
from naranhi.models.paced import Paced
from naranhi.models.pretrained import configuration
from naranhi.models.rotary import RotaryAttention
from naranhi.models.transformer_layer import TransformerLayer

__all__ = [
    "IGNORE_INDEX",
    "DeferredLM",
    "GPT2Block",
    "GPT2Embedding",
    "GPT2Head",
    "GatedMLP",
    "LlamaBlock",
    "LlamaEmbedding",
    "LlamaHead",
    "MLPBlock",
    "Paced",
    "RotaryAttention",
    "TransformerLayer",
    "causal_lm",
    "configuration",
    "gpt2",
    "gpt2_config",
    "gpt2_layers",
    "gpt2_model",
    "is_mixture",
    "llama",
    "llama_config",
    "llama_layers",
    "llama_model",
    "loss",
    "mlp",
    "seed_of",
    "transformers_model",
]
