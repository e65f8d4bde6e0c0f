"""GPT-2 as a list of layers, to be cut into stages.

A layer takes one argument and returns one value: a tensor or a tuple of tensors. So a list of them
is an `nn.Sequential`, and any run of them is one too.
"""

import copy
import os

import torch
from torch import nn

from naranhi.models.hub import fetching, offline


class GPT2Embedding(nn.Module):
    """Tokens and their positions as vectors: the first of GPT-2's layers.

    Takes tokens (batch, sequence) of whole numbers, or a tuple of these and a padding mask of the
    same shape, 1 where there is a token and 0 where there is padding. Returns the hidden state
    (batch, sequence, hidden), with the mask again if one was given.
    Raises ValueError for a sequence longer than the model has positions.
    """

    def __init__(self, transformer):
        super().__init__()
        self.wte, self.wpe, self.drop = transformer.wte, transformer.wpe, transformer.drop
        self.positions = transformer.wpe.num_embeddings

    def forward(self, inputs):
        tokens, mask = inputs if isinstance(inputs, tuple) else (inputs, None)
        length, positions = tokens.shape[-1], self.positions
        if length > positions:
            raise ValueError(f"{length} tokens in a row, but the model has {positions} positions")
        position = torch.arange(length, device=tokens.device).unsqueeze(0)
        hidden = self.drop(self.wte(tokens) + self.wpe(position))
        return hidden if mask is None else (hidden, mask)


class GPT2Block(nn.Module):
    """One block, unchanged from `transformers`: hidden state, or with a mask, in and out."""

    def __init__(self, block, attention):
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, inputs):
        hidden, mask = inputs if isinstance(inputs, tuple) else (inputs, None)
        output = self.block(hidden, attention_mask=self._visible(hidden, mask))
        output = output[0] if isinstance(output, tuple) else output  # transformers 5.0 returns one
        return output if mask is None else (output, mask)

    def _visible(self, hidden, mask):
        """Which tokens each token sees, in the form that this kind of attention takes."""
        if mask is None and self.attention == "sdpa":
            return None  # it is causal by itself then, and faster
        # A rank may have a part of the hidden state only (sequence parallelism), never of the mask.
        length = hidden.shape[1] if mask is None else mask.shape[-1]
        visible = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
        if mask is not None:
            visible = visible & mask.bool()[:, None, None, :]
        if self.attention == "sdpa":
            return visible
        score = torch.zeros(visible.shape, dtype=hidden.dtype, device=hidden.device)
        return score.masked_fill(~visible, torch.finfo(hidden.dtype).min)


class GPT2Head(nn.Module):
    """Final norm and head: hidden state, alone or with a mask, in; logits out, for each word."""

    def __init__(self, transformer, head):
        super().__init__()
        self.ln_f, self.lm_head = transformer.ln_f, head

    def forward(self, inputs):
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        return self.lm_head(self.ln_f(hidden))


def gpt2_config(vocabulary=1024, positions=128, hidden=64, heads=4, blocks=12):
    """A configuration of GPT-2, by default of 12 blocks so small that a CPU trains them.

    GPT-2 draws its weights with a deviation of 0.02, for which its hidden states are wide enough.
    Narrower ones need larger weights, or a block adds next to nothing to what passes through it,
    and some hundred steps go by before anything is learnt: here it is 0.02 sqrt(768 / hidden).
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


def gpt2(name_or_config=None, tied=True, dropout=None, attention="sdpa"):
    """GPT-2 as a list of layers: embedding, blocks, head. In training mode, weights in float32.

    name_or_config: None for `gpt2_config()`, or a configuration of one's own, with random weights
    from torch's generator; or, for trained weights, a name on the Hugging Face hub ("gpt2") or a
    folder written by `save_pretrained`.
    tied: see `gpt2_layers`. dropout: a probability; by default the configuration's (0.1).
    attention: "sdpa" (torch's fused one) or "eager" (a product, a softmax and a product).

    Raises OSError, and says what to do, when the weights are neither here nor to be fetched;
    ValueError when what is there is no GPT-2, and for another kind of attention.
    """
    from transformers import GPT2LMHeadModel

    if attention not in ("sdpa", "eager"):
        raise ValueError(f"attention is 'sdpa' or 'eager', not {attention!r}")
    names = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
    options = {} if dropout is None else dict.fromkeys(names, dropout)
    if isinstance(name_or_config, str | os.PathLike):
        model = _pretrained(os.fspath(name_or_config), options)
    else:
        config = gpt2_config() if name_or_config is None else copy.deepcopy(name_or_config)
        config.update(options)
        model = GPT2LMHeadModel(config)
    model.set_attn_implementation(attention)
    return gpt2_layers(model.train(), tied)


def gpt2_layers(model, tied=True):
    """The layers of a `transformers.GPT2LMHeadModel`, made of its own modules and parameters.

    A list of 2 + blocks layers. Each but the last returns the hidden state (batch, sequence,
    hidden), in a tuple with the padding mask if the first was given one; the last returns logits
    (batch, sequence, words). Their results and gradients are the model's.

    tied: keep one parameter for embedding and head, as the model has it: the first and the last
    layer then hold the same object. False gives the head a copy of its own.
    """
    head = model.lm_head
    if not tied:
        head = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    attention = model.config._attn_implementation
    blocks = [GPT2Block(block, attention) for block in model.transformer.h]
    return [GPT2Embedding(model.transformer), *blocks, GPT2Head(model.transformer, head)]


def _pretrained(name, options):
    from transformers import AutoConfig, GPT2LMHeadModel

    advice = (
        "That folder was not written by save_pretrained, or not completely."
        if os.path.isdir(name)
        else f"{offline(name)} Or do without: the default is a small GPT-2 with random weights."
    )
    with fetching(f"weights of {name!r}", advice):
        kind = AutoConfig.from_pretrained(name).model_type
        if kind != "gpt2":
            raise ValueError(f"{name!r} is a model of the kind {kind!r}, not a GPT-2")
        return GPT2LMHeadModel.from_pretrained(name, dtype=torch.float32, **options)
