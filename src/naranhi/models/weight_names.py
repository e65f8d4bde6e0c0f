"""The names of the weights in a model's files that make up each weight of the layers.

GPT-2's layers have its weights unchanged. Llama's layers join matrices with the same input, and all
experts. (In the files each expert is separate; in memory `transformers` joins the experts, too.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ENDS = {"wte": "embed_tokens", "norm": "norm"}
BLOCK = {
    "attn_norm": ["input_layernorm"],
    "attn.qkv": [f"self_attn.{kind}_proj" for kind in "qkv"],
    "attn.q_norm": ["self_attn.q_norm"],
    "attn.k_norm": ["self_attn.k_norm"],
    "attn.proj": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}
EXPERTS = {  # by model_type, names of: a mixture; an expert's gate, up and down
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def sources(name: str, config: PreTrainedConfig, experts: Iterable[int] | None = None) -> list[str]:
    """Return the names, in a model's files, of the weights that make up a weight of the layers.

    Args:
        name: as in `nn.ModuleList(layers).state_dict()`.
        config: the model's configuration.
        experts: which experts of a mixture; all if None.
    """
    number, own = name.split(".", 1)
    if own == "lm_head.weight":
        return [own]
    if config.model_type == "gpt2":
        inside = own.removeprefix("block.")
        return [f"transformer.{f'h.{int(number) - 1}.' * (inside != own)}{inside}"]
    module, kind = own.rsplit(".", 1)
    if module in ENDS:
        return [f"model.{ENDS[module]}.{kind}"]
    if module in ("mlp.gate", "mlp.experts"):
        return _of_mixture(f"model.layers.{int(number) - 1}", kind, config, experts)
    return [f"model.layers.{int(number) - 1}.{theirs}.{kind}" for theirs in BLOCK[module]]


def joined(name: str, tensors: list[torch.Tensor], config: PreTrainedConfig) -> torch.Tensor:
    """Join the weights named by `sources` into a weight of the layers.

    Args:
        name: the name of the weight.
        tensors: what it is made of, in the order of `sources`.
        config: the model's configuration.
    """
    if ".attn.qkv." in name:
        return by_group(tensors, config.num_key_value_heads)
    if ".mlp.experts." in name:
        products = 2 if name.endswith("gate_up_proj") else 1
        return torch.cat(tensors).unflatten(0, (len(tensors) // products, -1))
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def parted(name: str, tensor: torch.Tensor, config: PreTrainedConfig) -> list[torch.Tensor]:
    """Split a weight of the layers into the weights that make it up: the inverse of `joined`.

    Args:
        name: the name of the weight.
        tensor: the weight.
        config: the model's configuration.
    """
    if ".attn.qkv." in name:
        return by_kind(tensor, config.num_key_value_heads, head_size(config))
    if ".mlp.experts." in name:
        tensor = tensor.flatten(0, 1)
    return list(tensor.chunk(len(sources(name, config))))


def _of_mixture(layer, kind, config, experts):
    """Return the names of the router, or of experts, one after the other."""
    mixture, *up, down = EXPERTS[config.model_type]
    if kind == "weight":
        return [f"{layer}.{mixture}.gate.weight"]
    products = up if kind == "gate_up_proj" else [down]
    return [
        f"{layer}.{mixture}.experts.{expert}.{product}.weight"
        for expert in (range(config.num_experts) if experts is None else experts)
        for product in products
    ]


def by_group(tensors: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Return queries, keys and values in one tensor, group by group, along the first dimension."""
    parts = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
    return torch.cat(parts, 1).flatten(0, 1)


def by_kind(tensor: torch.Tensor, groups: int, head_size: int) -> list[torch.Tensor]:
    """Return queries, keys and values of a tensor as `by_group` returns it."""
    parts = tensor.unflatten(0, (groups, -1, head_size)).split(
        (tensor.shape[0] // (groups * head_size) - 2, 1, 1), 1
    )
    return [part.flatten(0, 2) for part in parts]


def head_size(config: PreTrainedConfig) -> int:
    """Return the size of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
