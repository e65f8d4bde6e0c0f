"""GPT-2 as a list of layers, to be cut into stages.

A layer has one argument and returns one value: a tensor or a tuple of tensors. So the list makes an
`nn.Sequential`, and so does any contiguous part of it.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from naranhi.models.masks import visible_tokens
from naranhi.models.pretrained import pretrained

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model


DROPOUTS = "attn_pdrop", "embd_pdrop", "resid_pdrop"  # in a configuration


class GPT2Embedding(nn.Module):
    """Tokens and their positions as vectors: the first of GPT-2's layers.

    In: tokens (batch, sequence) of an integer dtype, or a tuple of the tokens and a padding mask of
    the same shape, 1 for a token and 0 for padding. Out: the hidden state (batch, sequence,
    hidden), in a tuple with the mask if there was one.

    Args:
        transformer: the model whose embeddings and dropout this layer uses.

    Raises:
        ValueError: in the forward, for a sequence longer than the model has positions.
    """

    wte: nn.Embedding
    wpe: nn.Embedding
    drop: nn.Dropout
    positions: int

    def __init__(self, transformer: GPT2Model) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = transformer.wte, transformer.wpe, transformer.drop
        self.positions = transformer.wpe.num_embeddings

    def forward(
        self, inputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden state of the tokens, with the mask if there is one."""
        tokens, mask = inputs if isinstance(inputs, tuple) else (inputs, None)
        length, positions = tokens.shape[-1], self.positions
        if length > positions:
            raise ValueError(f"{length} tokens in a row, but the model has {positions} positions")
        position = torch.arange(length, device=tokens.device).unsqueeze(0)
        # Torch's embedding takes only int32 and int64.
        hidden = self.drop(self.wte(tokens.long()) + self.wpe(position))
        return hidden if mask is None else (hidden, mask)


class GPT2Block(nn.Module):
    """One block, unchanged from `transformers`: hidden state, alone or with a mask, in and out.

    Args:
        block: the block of `transformers`.
        attention: "sdpa" or "eager", as in `gpt2`.
    """

    block: nn.Module
    attention: str

    def __init__(self, block: nn.Module, attention: str) -> None:
        super().__init__()
        self.block, self.attention = block, attention

    def forward(
        self, inputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the block's hidden state, with the mask if there is one."""
        hidden, mask = inputs if isinstance(inputs, tuple) else (inputs, None)
        output = self.block(hidden, attention_mask=self._visible(hidden, mask))
        output = (
            output[0] if isinstance(output, tuple) else output
        )  # transformers 5.0 returns a tuple
        return output if mask is None else (output, mask)

    def _visible(self, hidden, mask):
        """Return which tokens each token sees, in the form that this kind of attention needs."""
        if mask is None and self.attention == "sdpa":
            return None  # sdpa is causal by itself then, and faster
        # A rank may have a part of the hidden state (sequence parallelism), but has the whole mask.
        length = hidden.shape[1] if mask is None else mask.shape[-1]
        visible = visible_tokens(length, mask, hidden.device)
        if self.attention == "sdpa":
            return visible
        score = torch.zeros(visible.shape, dtype=hidden.dtype, device=hidden.device)
        return score.masked_fill(~visible, torch.finfo(hidden.dtype).min)


class GPT2Head(nn.Module):
    """Final norm and LM head: hidden state, alone or with a mask, in; logits out.

    Args:
        transformer: the model whose final norm this layer uses.
        head: from the hidden state to one logit for each token of the vocabulary.
    """

    ln_f: nn.LayerNorm
    lm_head: nn.Linear

    def __init__(self, transformer: GPT2Model, head: nn.Linear) -> None:
        super().__init__()
        self.ln_f, self.lm_head = transformer.ln_f, head

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the logits, (batch, sequence, vocabulary)."""
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        return self.lm_head(self.ln_f(hidden))


def gpt2_config(
    vocabulary: int = 1024,
    positions: int = 128,
    hidden: int = 64,
    heads: int = 4,
    blocks: int = 12,
) -> GPT2Config:
    """Return a configuration of GPT-2, by default of 12 blocks so small that a CPU trains them.

    GPT-2 draws its weights with a standard deviation of 0.02, for which its hidden states are wide
    enough. Narrower hidden states need larger weights. Otherwise a block adds next to nothing to
    its input, and the model learns nothing for some hundred steps. So the deviation is
    0.02 sqrt(768 / hidden) here.

    Args:
        vocabulary: the number of tokens in the vocabulary.
        positions: the length of the longest sequence, in tokens.
        hidden: the size of the hidden state.
        heads: the number of attention heads.
        blocks: the number of blocks.
    """
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=hidden,
        n_head=heads,
        n_layer=blocks,
        initializer_range=0.02 * (768 / hidden) ** 0.5,
        bos_token_id=None,
        eos_token_id=None,
    )


def gpt2(
    name_or_config: str | os.PathLike[str] | GPT2Config | None = None,
    tied: bool = True,
    dropout: float | None = None,
    attention: str = "sdpa",
) -> list[nn.Module]:
    """Return GPT-2 as a list of layers: embedding, blocks, head.

    The layers are in training mode, with weights in float32.

    Args:
        name_or_config: None for `gpt2_config()`, or another configuration, with random weights from
            torch's generator; or, for trained weights, a name on the Hugging Face hub ("gpt2") or a
            folder written by `save_pretrained`.
        tied: see `gpt2_layers`.
        dropout: a probability; by default the configuration's (0.1).
        attention: "sdpa" (torch's fused attention) or "eager" (a product, a softmax and a product).

    Raises:
        OSError: if the weights are not on disk and cannot be fetched; the error says what to do.
        ValueError: if the model found is not a GPT-2, or for another kind of attention.
    """
    from transformers import GPT2LMHeadModel

    if attention not in ("sdpa", "eager"):
        raise ValueError(f"attention is 'sdpa' or 'eager', not {attention!r}")
    options = {} if dropout is None else dict.fromkeys(DROPOUTS, dropout)
    if isinstance(name_or_config, str | os.PathLike):
        model = pretrained(os.fspath(name_or_config), ("gpt2",), "a GPT-2", options)
    else:
        config = gpt2_config() if name_or_config is None else copy.deepcopy(name_or_config)
        if config.model_type != "gpt2":
            raise ValueError(f"the configuration is of the kind {config.model_type!r}, not a GPT-2")
        config.update(options)
        model = GPT2LMHeadModel(config)
    model.set_attn_implementation(attention)
    return gpt2_layers(model.train(), tied)


def gpt2_layers(model: GPT2LMHeadModel, tied: bool = True) -> list[nn.Module]:
    """Return the layers of a `transformers.GPT2LMHeadModel`, made of its modules and parameters.

    Their results and gradients are the model's.

    Args:
        model: the model.
        tied: keep one parameter for embedding and head, as in the model: the first and the last
            layer then hold the same object. With False, the head gets a separate copy.

    Returns:
        2 + blocks layers. Each but the last returns the hidden state (batch, sequence, hidden), in
        a tuple with the padding mask if the first layer received one; the last layer returns logits
        (batch, sequence, vocabulary).
    """
    head = model.lm_head
    if not tied:
        head = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        weight = model.lm_head.weight
        head.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    attention = model.config._attn_implementation
    blocks = [GPT2Block(block, attention) for block in model.transformer.h]
    return [GPT2Embedding(model.transformer), *blocks, GPT2Head(model.transformer, head)]
