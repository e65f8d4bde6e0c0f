"""Llama as a list of layers, to be cut into stages.

A block differs from GPT-2's in five ways. RMSNorm has no mean and no bias. Positions are not
embedded, but rotate queries and keys. Several heads of queries share one head of keys and values.
The MLP multiplies two products, one of them through an activation. And most models of this kind
have no biases.

Queries, keys and values are one matrix product here, and so are the two that the MLP multiplies:
fewer and larger products, and with tensor parallelism one all-reduce of the input's gradient
instead of three, or two.

Sources: Touvron et al., "LLaMA" (2023), section 2.2; Zhang and Sennrich, "Root mean square layer
normalization" (2019); Shazeer, "GLU variants improve Transformer" (2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from naranhi.models.rotary import RotaryAttention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class LlamaEmbedding(nn.Module):
    """Tokens as vectors: the first of Llama's layers.

    In: tokens (batch, sequence) of an integer dtype, or a tuple of the tokens and a padding mask of
    the same shape, 1 for a token and 0 for padding. Out: the hidden state (batch, sequence,
    hidden), in a tuple with the mask if there was one.

    Args:
        wte: the embedding of tokens.
        config: the model's configuration.

    Attributes:
        positions: the longest sequence, in tokens: what the model was made for, or the window of
            its attention, if that is shorter.

    Raises:
        ValueError: in the forward, for a longer sequence.
    """

    wte: nn.Embedding
    config: PreTrainedConfig
    positions: int

    def __init__(self, wte: nn.Embedding, config: PreTrainedConfig) -> None:
        super().__init__()
        self.wte, self.config = wte, config
        # In a sequence no longer than the window, windowed attention is full attention.
        self._limits = {"max_position_embeddings": config.max_position_embeddings}
        if window := getattr(config, "sliding_window", None):
            self._limits["sliding_window"] = window
        self.positions = min(self._limits.values())

    def forward(
        self, inputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden state of the tokens, with the mask if there is one."""
        tokens, mask = inputs if isinstance(inputs, tuple) else (inputs, None)
        self.require_positions(tokens.shape[-1])
        hidden = self.wte(tokens.long())
        return hidden if mask is None else (hidden, mask)

    def require_positions(self, length: int) -> None:
        """Raise ValueError for a sequence longer than `positions`, naming what limits it."""
        if length > self.positions:
            limit = min(self._limits, key=self._limits.get)
            raise ValueError(
                f"{length} tokens in a row, but the model has {limit} {self.positions}"
            )


class GatedMLP(nn.Module):
    """A gated MLP: down(activation(gate(x)) * up(x)).

    Args:
        gate_up: (..., hidden) to (..., 2 x inner): the gate, then what it multiplies.
        down: (..., inner) to (..., hidden).
        activation: the activation of the gate.
    """

    gate_up: nn.Module
    down: nn.Module
    activation: nn.Module

    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result, of the shape of x."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


class LlamaBlock(nn.Module):
    """One block: hidden state, alone or with a mask, in and out.

    Args:
        attn_norm: the norm before the attention.
        attn: the attention.
        mlp_norm: the norm before the MLP.
        mlp: the MLP, or the mixture of experts of a model of transformers, with all its experts
            (`expert_parallel.divide_experts` divides them over ranks).
    """

    attn_norm: nn.Module
    attn: RotaryAttention
    mlp_norm: nn.Module
    mlp: nn.Module

    def __init__(
        self, attn_norm: nn.Module, attn: RotaryAttention, mlp_norm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp

    @property
    def sparse(self) -> bool:
        """Whether the block has a mixture of experts, undivided."""
        return hasattr(self.mlp, "experts")

    def forward(
        self, inputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the block's hidden state, with the mask if there is one."""
        hidden, mask = inputs if isinstance(inputs, tuple) else (inputs, None)
        hidden = hidden + self.attn(self.attn_norm(hidden), mask)
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return hidden if mask is None else (hidden, mask)


class LlamaHead(nn.Module):
    """Final norm and LM head: hidden state, alone or with a mask, in; logits out.

    Args:
        norm: the final norm.
        lm_head: from the hidden state to one logit for each token of the vocabulary.
    """

    norm: nn.Module
    lm_head: nn.Linear

    def __init__(self, norm: nn.Module, lm_head: nn.Linear) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, lm_head

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the logits, (batch, sequence, vocabulary)."""
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        return self.lm_head(self.norm(hidden))
