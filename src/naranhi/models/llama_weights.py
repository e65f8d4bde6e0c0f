"""Llama and its relatives as a list of layers, from transformers' model.

The layers join matrices that have the same input into one, so their weights are copies.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from naranhi.models.llama_blocks import GatedMLP, LlamaBlock, LlamaEmbedding, LlamaHead
from naranhi.models.pretrained import pretrained, readable, require_trainable
from naranhi.models.rotary import Rotary, RotaryAttention
from naranhi.models.weight_names import by_group, head_size

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

# The values of `model_type` in a config.json.
KINDS = "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"
KIND = "a model of Llama's kind (Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE)"


def llama_config(
    vocabulary: int = 1024,
    positions: int = 128,
    hidden: int = 64,
    heads: int = 4,
    groups: int = 2,
    inner: int | None = None,
    blocks: int = 12,
) -> LlamaConfig:
    """Return a configuration of Llama, by default of 12 blocks so small that a CPU trains them.

    As in `gpt2_config`, narrower models are initialized with larger weights.

    Args:
        vocabulary: the number of tokens in the vocabulary.
        positions: the length of the longest sequence, in tokens.
        hidden: the size of the hidden state.
        heads: the number of heads of queries.
        groups: the number of heads of keys and values; it divides `heads`.
        inner: the size between the MLP's products; by default 8/3 of the hidden size, rounded up to
            a multiple of 32, for about as many weights as an MLP without a gate.
        blocks: the number of blocks.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner or -(-hidden // 12) * 32,
        num_hidden_layers=blocks,
        initializer_range=0.02 * (768 / hidden) ** 0.5,
        bos_token_id=None,
        eos_token_id=None,
    )


def llama(
    name_or_config: str | os.PathLike[str] | PreTrainedConfig | None = None, tied: bool = True
) -> list[nn.Module]:
    """Return Llama, or a relative, as a list of layers: embedding, blocks, head.

    The layers are in training mode, with weights in float32.

    Args:
        name_or_config: None for `llama_config()`, or another configuration, with random weights
            from torch's generator; or, for trained weights, a name on the Hugging Face hub or a
            folder written by `save_pretrained`.
        tied: see `llama_layers`.

    Raises:
        OSError: if the weights are not on disk and cannot be fetched; the error says what to do.
        ValueError: if the model is of another kind, or not supported by these layers.
    """
    from transformers import AutoModelForCausalLM

    if isinstance(name_or_config, str | os.PathLike):
        model = pretrained(os.fspath(name_or_config), KINDS, KIND)
    else:
        config = llama_config() if name_or_config is None else copy.deepcopy(name_or_config)
        _require_supported(config)
        with readable("the configuration", KIND):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return _layers(model.train(), tied, taking=True)


def llama_layers(model: PreTrainedModel, tied: bool = True) -> list[nn.Module]:
    """Return the layers of a `transformers.LlamaForCausalLM`, or of a relative.

    Their results are the model's, up to rounding. Embedding, head, norms and mixtures of experts
    have the model's parameters; the other weights are copies. A joined weight is trained if
    any of its parts is.

    Mixtures of experts run the kernels of transformers. These support neither float64 nor
    tensors without values, with which a pipeline infers the shapes of its messages. If you need
    either, divide the experts first, on a group of one rank if need be
    (`expert_parallel.divide_experts`).

    Args:
        model: the model.
        tied: whether embedding and head stay one parameter, if they are in the model: the first and
            the last layer then hold the same object. With False, the head gets a separate copy.

    Returns:
        2 + blocks layers. Each but the last returns the hidden state (batch, sequence, hidden), in
        a tuple with the padding mask if the first layer received one; the last layer returns logits
        (batch, sequence, vocabulary).

    Raises:
        ValueError: the model is of another kind, or has dropout, router noise, or rotation
            angles that depend on a sequence's length.
    """
    return _layers(model, tied, taking=False)


def _layers(model, tied, taking):
    """Do as `llama_layers`; `taking` pops the model's blocks, so memory holds each only once."""
    config, body, head = model.config, model.model, model.lm_head
    _require_supported(config)
    if not tied and head.weight is body.embed_tokens.weight:
        weight = head.weight
        head = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        head.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    angles = body.rotary_emb
    if angles.inv_freq.is_meta:  # computed, not loaded: it needs values now
        with torch.device("cpu"):
            angles = type(angles)(config)
    rotary = Rotary(angles.inv_freq, angles.attention_scaling)
    return [
        LlamaEmbedding(body.embed_tokens, config),
        *(
            _block(body.layers.pop(0) if taking else body.layers[number], rotary)
            for number in range(len(body.layers))
        ),
        LlamaHead(_norm(body.norm), head),
    ]


def _require_supported(config):
    """Raise ValueError for what the layers here do not compute."""
    if config.model_type not in KINDS:
        raise ValueError(f"a model of the kind {config.model_type!r} is not {KIND}")
    if dropout := getattr(config, "attention_dropout", 0.0):
        raise ValueError(
            f"attention_dropout is {dropout}: these layers have no dropout, set it to 0"
        )
    if noise := getattr(config, "router_jitter_noise", 0.0):
        raise ValueError(f"router_jitter_noise is {noise}: these layers have no noise, set it to 0")
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"rotary positions of the kind {kind!r} depend on a sequence's length, of which a rank "
            "may have a part: choose default, linear, llama3 or yarn"
        )
    require_trainable(config, "the configuration")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} heads of keys and values do not divide {heads} of queries")
    size = head_size(config)
    if size < 2 or size % 2:
        raise ValueError(
            f"a head needs a positive, even size, not {size}: positions rotate pairs of elements"
        )


def _block(layer, rotary):
    """Return the `LlamaBlock` of a decoder layer of transformers."""
    attention, mlp = layer.self_attn, layer.mlp
    groups = attention.config.num_key_value_heads
    kinds = [attention.q_proj, attention.k_proj, attention.v_proj]
    norms = [
        norm and _norm(norm)
        for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    ]
    return LlamaBlock(
        _norm(layer.input_layernorm),
        RotaryAttention(
            groups,
            attention.num_key_value_groups,
            attention.head_dim,
            _joined(kinds, lambda tensors: by_group(tensors, groups)),
            _joined([attention.o_proj], torch.cat),
            rotary,
            *norms,
        ),
        _norm(layer.post_attention_layernorm),
        mlp if hasattr(mlp, "experts") else _gated(mlp),
    )


def _gated(mlp):
    """Return the `GatedMLP` of an MLP of transformers."""
    return GatedMLP(
        _joined([mlp.gate_proj, mlp.up_proj], torch.cat),
        _joined([mlp.down_proj], torch.cat),
        copy.deepcopy(mlp.act_fn),
    )


def _joined(linears, join):
    """Return the linear layer whose outputs are those of `linears`, in the order of `join`."""
    outputs = sum(linear.out_features for linear in linears)
    bias = linears[0].bias is not None
    joined = nn.Linear(linears[0].in_features, outputs, bias=bias, device="meta")
    for name in ("weight", "bias") if bias else ("weight",):
        tensors = [getattr(linear, name) for linear in linears]
        trained = any(tensor.requires_grad for tensor in tensors)
        whole = join([tensor.detach() for tensor in tensors])
        setattr(joined, name, nn.Parameter(whole, requires_grad=trained))
    return joined


def _norm(norm):
    """Return torch's RMSNorm, a fused operation, with the parameter of a norm of transformers."""
    own = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, device="meta")
    own.weight = norm.weight
    return own
