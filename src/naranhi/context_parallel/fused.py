"""Torch's fused attention with its log-sum-exp, and a plain substitute where torch has none.

`scaled_dot_product_attention` does not return the log-sum-exp; the operators behind it do, and
their backward accepts the log-sum-exp over all keys. Torch chooses the operator: FlashAttention on
a CPU; FlashAttention, or cuDNN's where that is faster, on a GPU in 16 bits; the memory-efficient
attention of xFormers on a GPU in 32 bits, or on older GPUs. Elsewhere on a GPU (float64, head sizes
that are not multiples of 8), plain products hold the scores of the whole tile.

Shapes, everywhere: queries, outputs and gradients of both (batch, heads, queries, head size); keys
and values (batch, heads, keys, head size); lse (batch, heads, queries), in fp32 unless tensors are
in float64. With `causal` there are as many keys as queries, and query i sees keys 0 to i.

Sources: Dao et al., "FlashAttention" (2022); Rabe and Staats, "Self-attention does not need O(n²)
memory" (2021).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

aten: Any = torch.ops.aten
KERNELS = {
    int(SDPBackend.CUDNN_ATTENTION): "cudnn",
    int(SDPBackend.FLASH_ATTENTION): "flash",
    int(SDPBackend.EFFICIENT_ATTENTION): "efficient",
}
LSE_ROWS = 32  # the memory-efficient kernel pads the queries of its lse to a multiple of this


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> str:
    """Return which attention computes this: "cpu", "cudnn", "flash", "efficient" or "plain"."""
    if query.device.type == "cpu":
        return "cpu"
    if query.device.type == "cuda" and query.shape[-1] % 8 == 0:  # no kernel pads heads by itself
        # Choose as in training: some kernels have a forward for a head size, but no backward.
        if not query.is_inference():
            query = query.detach().requires_grad_()
        with torch.enable_grad():
            choice = torch._fused_sdp_choice(query, key, value, None, 0.0, causal)
        return KERNELS.get(choice, "plain")
    return "plain"


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and lse."""
    which = kernel(query, key, value, causal)
    if which == "plain":
        return plain_forward(query, key, value, causal, scale)
    if which == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
    if which == "flash":
        output, lse, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )
        return output, lse
    if which == "cudnn":
        output, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return output, lse.view(query.shape[:3])
    output, lse, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    return output, lse[..., : query.shape[2]]


def backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, from output and lse over all keys."""
    given, which = (grad_output, query, key, value), kernel(query, key, value, causal)
    if which == "plain":
        return plain_backward(*given, output, lse, causal, scale)
    if which == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, output, lse, 0.0, causal, scale=scale
        )
    # Placeholders for the state of dropout and for packed sequences: neither is used here.
    none, lengths = query.new_empty(0, dtype=torch.int64), (query.shape[2], key.shape[2])
    if which == "flash":
        rest = None, None, *lengths, 0.0, causal, none, none
        return aten._scaled_dot_product_flash_attention_backward(
            *given, output, lse.contiguous(), *rest, scale=scale
        )
    if which == "cudnn":
        rest = none, none, None, None, None, *lengths, 0.0, causal
        return aten._scaled_dot_product_cudnn_attention_backward(
            *given, output, lse.contiguous().unsqueeze(-1), *rest, scale=scale
        )
    rows = -lse.shape[-1] % LSE_ROWS
    padded = torch.nn.functional.pad(lse, (0, rows), value=torch.inf)
    rest = none, none, 0.0, [True, True, True, False], causal
    grads = aten._scaled_dot_product_efficient_attention_backward(
        *given, None, output, padded, *rest, scale=scale
    )
    return grads[:3]


def plain_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and lse by plain products, which hold the scores of the whole tile.

    Scores are computed in fp32 or wider: rounded to 16 bits, they would be off by more than the
    output's rounding, and so would `lse`, by which tiles are merged.
    """
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    output = (scores - lse.unsqueeze(-1)).exp() @ value.to(scores.dtype)
    return output.to(value.dtype), lse


def plain_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, from output and lse over all keys."""
    weights = (_scores(query, key, causal, scale) - lse.unsqueeze(-1)).exp()
    wide = weights.dtype
    grad_output, output = grad_output.to(wide), output.to(wide)
    inner = (grad_output * output).sum(-1, keepdim=True)
    to_scores = weights * (grad_output @ value.to(wide).mT - inner) * scale
    return (
        (to_scores @ key.to(wide)).to(query.dtype),
        (to_scores.mT @ query.to(wide)).to(key.dtype),
        (weights.mT @ grad_output).to(value.dtype),
    )


def _scores(query, key, causal, scale):
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scale
    if causal:
        behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(behind, -torch.inf)
    return scores
