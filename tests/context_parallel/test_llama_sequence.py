"""Llama with its sequence cut across ranks: logits as in one process, and what is refused."""

from copy import deepcopy

import pytest
import small_llama
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn

from naranhi import models
from naranhi.autograd import Recompute
from naranhi.context_parallel import (
    cut_sequence,
    gathered_attention,
    join_sequence,
    ring_attention,
    ulysses_attention,
)

LENGTH = 24
WAYS = {"ring": ring_attention, "gathered": gathered_attention, "ulysses": ulysses_attention}


def llama():
    torch.manual_seed(0)
    config = small_llama.config("qwen3", max_position_embeddings=LENGTH)
    return [layer.double() for layer in models.llama(config)]


def tokens():
    return torch.randint(512, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(way, order):
    """Of a copy: the largest difference from one process; weights under the same names."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    expected = nn.Sequential(*llama())(tokens())
    model = nn.Sequential(*cut_sequence(llama(), group, attention=WAYS[way], order=order))
    assert model.state_dict().keys() == nn.Sequential(*llama()).state_dict().keys()
    found = join_sequence(deepcopy(model)(tokens()).detach(), group, order=order, dim=1)
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["plain", "head_tail"])
def test_logits_are_those_of_one_process(five, way, order):
    assert max(five.call(logits, way, order)[:2]) < 1e-12


def changed(change):
    layers = llama()
    change(layers)
    return layers


def with_hook(layers):
    layers[2].attn.register_forward_hook(lambda module, inputs, output: None)


def with_subclass(layers):
    layers[1].attn.__class__ = type("Scaled", (type(layers[1].attn),), {})


def with_another_head(layers):
    layers[-1] = models.gpt2()[-1]


def refused():
    group, rank, found = first_ranks(2), dist.get_rank(), {}
    if rank >= 2:
        return None

    def attempt(what, function, *args, **options):
        with pytest.raises((TypeError, ValueError)) as error:
            function(*args, **options)
        found[what] = str(error.value)

    attempt("twice", cut_sequence, cut_sequence(llama(), group), group)
    attempt("hook", cut_sequence, changed(with_hook), group)
    attempt("subclass", cut_sequence, changed(with_subclass), group)
    attempt("wrapped", cut_sequence, [llama()[0], *map(Recompute, llama()[1:])], group)
    attempt("head", cut_sequence, changed(with_another_head), group)
    model = nn.Sequential(*cut_sequence(llama(), group))
    attempt("divide", model, tokens()[:, :7])
    attempt("tokens", model, tokens() + rank)
    attempt("mask", model, (tokens(), torch.ones_like(tokens())))
    attempt("positions", model, torch.cat([tokens(), tokens()], 1))
    return found


def test_what_llama_refuses(five):
    first, second = five.call(refused)[:2]
    assert first == second
    expected = {
        "twice": "the first layer must be the embedding of models.gpt2 or models.llama",
        "hook": "2.attn: the forward hook <lambda> would be lost",
        "subclass": "1.attn is a Scaled, whose own behaviour would be lost: the attention of models"
        ".llama is needed",
        "wrapped": "layer 1 is a Recompute, not a block or head of models.llama",
        "head": "layer 3 is a GPT2Head, not a block or head of models.llama",
        "divide": "2 ranks do not divide a sequence of 7",
        "tokens": "rank 0 and rank 1 have different tokens",
        "mask": "padding masks are not supported",
        "positions": "48 tokens in a row, but the model has max_position_embeddings 24",
    }
    assert first.keys() == expected.keys()
    for what, words in expected.items():
        assert words in first[what], first[what]
