"""Read a model from a Hugging Face `config.json`, without the library that wrote it."""

import json
from pathlib import Path
from typing import Any

from naranhi.planning.latent import Latent

# The known families, grouped by the layout of their dense MLP and their experts.
GPT2 = ("gpt2",)
LLAMA = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
FAMILIES = GPT2 + LLAMA + EXPERTS + DEEPSEEK
TRAINED = (*GPT2, *LLAMA, "mixtral", "qwen3_moe")  # by `naranhi.train`
# What transformers takes for sizes that a file leaves out, where no other size of it says them.
LEFT_OUT = {
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen2_moe": {"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": {"num_key_value_heads": 4},
    "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536},
    "deepseek_v3": {"n_shared_experts": 1, "q_lora_rank": 1536, "first_k_dense_replace": 3},
}


def family_of(path: str | Path | dict[str, Any]) -> str | None:
    """Return the `model_type` of a configuration, known here or not; None if it names none.

    Args:
        path: The file, the directory that contains it, or its content as a dict.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not a JSON object.
    """
    return _load(path)[1].get("model_type")


def read_config(path: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Model` that a configuration specifies.

    A sliding window is ignored: attention is assumed to see the whole sequence, so forecasts for
    sequences longer than the window are too slow.

    Args:
        path: The file, the directory that contains it, or its content as a dict.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not a JSON object, its family is unknown, or a size or flag is
            missing, wrong, or impossible to express in a `Model`.
    """
    where, config = _load(path)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{where}: model_type {family!r} is not supported; choose one of "
            f"{', '.join(FAMILIES)}, or give the sizes to Model(...) instead"
        )

    config = LEFT_OUT.get(family, {}) | config

    def size(name, *, default=None, least=1):
        value = config.get(name)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{where}: {name} is missing, and a {family} configuration needs it")
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise ValueError(f"{where}: {name} is a whole number >= {least}, not {value!r}")
        return value

    def flag(name, *, default):
        value = default if config.get(name) is None else config[name]
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {name} is true or false, not {value!r}")
        return value

    if family in GPT2:
        hidden = size("n_embd")
        return {
            "layers": size("n_layer"),
            "hidden": hidden,
            "heads": size("n_head"),
            "ffn": size("n_inner", default=4 * hidden),
            "vocabulary": size("vocab_size"),
            "positions": size("n_positions"),
            "tied": flag("tie_word_embeddings", default=True),
            "biases": True,
            "dropout": True,
        }
    heads = size("num_attention_heads")
    sizes = {
        "layers": size("num_hidden_layers"),
        "hidden": size("hidden_size"),
        "heads": heads,
        "ffn": size("intermediate_size"),
        "vocabulary": size("vocab_size"),
        "kv_heads": size("num_key_value_heads", default=heads),
        "head_dim": None if config.get("head_dim") is None else size("head_dim"),
        "gated": True,
        "tied": flag("tie_word_embeddings", default=False),
    }
    if family == "mixtral":
        sizes |= {"experts": size("num_local_experts"), "top_k": size("num_experts_per_tok")}
    elif family in EXPERTS:
        _refuse_mixed_layers(where, config)
        inner = size("moe_intermediate_size")
        shared, rest = divmod(size("shared_expert_intermediate_size", default=0, least=0), inner)
        if rest:
            raise ValueError(
                f"{where}: shared_expert_intermediate_size = {shared * inner + rest} is not a "
                f"multiple of moe_intermediate_size = {inner}: Model counts shared "
                "experts of that size"
            )
        sizes |= {
            "experts": size("num_experts", default=config.get("num_local_experts")),
            "top_k": size("num_experts_per_tok"),
            "expert_ffn": inner,
            "shared_experts": shared,
        }
    elif family in DEEPSEEK:
        _refuse_mixed_layers(where, config)
        sizes |= {
            "kv_heads": heads,
            "head_dim": size("v_head_dim"),
            "experts": size("n_routed_experts"),
            "top_k": size("num_experts_per_tok"),
            "expert_ffn": size("moe_intermediate_size"),
            "shared_experts": size("n_shared_experts", default=0, least=0),
            "dense_layers": size("first_k_dense_replace", default=0, least=0),
            "latent": Latent(
                size("q_lora_rank", default=0, least=0),
                size("kv_lora_rank"),
                size("qk_rope_head_dim"),
                size("qk_nope_head_dim"),
                size("v_head_dim"),
            ),
        }
    return sizes


def _load(path):
    if isinstance(path, dict):
        return "this configuration", path
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: give a config.json, or its directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not the configuration of a model: it is not a JSON object")
    return str(file), config


def _refuse_mixed_layers(where, config):
    """Raise ValueError if dense and sparse layers alternate, which `Model` cannot express."""
    steps = "decoder_sparse_step", "moe_layer_freq"
    if any(config.get(step) not in (None, 1) for step in steps) or config.get("mlp_only_layers"):
        raise ValueError(
            f"{where}: dense and sparse layers alternate ({', '.join(steps)}, mlp_only_layers), "
            "which is not supported"
        )
