"""Models of Llama's kind of two blocks, in a folder with a tokenizer, in the form of real ones."""

import small_corpus
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from naranhi import data

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Llama 3's angles, Qwen2's biases and tie, Qwen3's norms and size of a head; Mixtral's experts, and
# Qwen3-MoE's in one of two blocks.
KINDS = {
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "router_aux_loss_coef": 0.1}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
    ),
}


def config(kind, **more):
    """The configuration of a kind of model."""
    cls, options = KINDS[kind]
    return cls(**(SIZES | {"vocab_size": 512} | options | more))


def write(folder, kind, **more):
    """Write the model, its tokenizer and a corpus; return the options that name them."""
    data.tokenizer().save_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config(kind, **more))
    for name, param in model.named_parameters():  # not zeros, nor ones
        if name.endswith("bias") or "norm" in name:
            param.data.add_(param.data.clone().uniform_(-0.3, 0.3))
    model.save_pretrained(folder)
    return ["--model", str(folder), *small_corpus.write(folder)]
