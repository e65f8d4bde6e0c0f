"""GPT-2 with its sequence cut across ranks: trained as in one process, and what is refused."""

from copy import deepcopy

import pytest
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
    split_sequence,
    ulysses_attention,
)
from naranhi.data_parallel import all_reduce_bucketed, global_count

WAYS = {"ring": ring_attention, "gathered": gathered_attention, "ulysses": ulysses_attention}
LENGTH, STEPS = 24, 6


def gpt2(dropout=0.0, heads=4, attention="sdpa"):
    torch.manual_seed(0)
    config = models.gpt2_config(vocabulary=60, positions=LENGTH, hidden=16, heads=heads, blocks=2)
    return [layer.double() for layer in models.gpt2(config, dropout=dropout, attention=attention)]


def batch(step):
    """Tokens and targets; the second row ends early, so the ranks have other numbers of targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(60, (2, LENGTH), generator=generator)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = models.IGNORE_INDEX
    targets[1, 4 + 3 * step :] = models.IGNORE_INDEX
    return tokens, targets


def alone():
    layers = nn.Sequential(*gpt2())
    optimizer, losses = torch.optim.SGD(layers.parameters(), lr=0.5), []
    for step in range(STEPS):
        tokens, targets = batch(step % 2)
        loss = models.loss(layers(tokens), targets) / (targets != models.IGNORE_INDEX).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, layers


def trained(ranks, way, order):
    """The losses' largest difference from one process, and the weights'; the first and last."""
    group = first_ranks(ranks)
    if dist.get_rank() >= ranks:
        return None
    expected, alone_layers = alone()
    model = nn.Sequential(*cut_sequence(gpt2(), group, attention=WAYS[way], order=order))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(STEPS):
        tokens, targets = batch(step % 2)
        own = split_sequence(targets, group, order=order)
        count = global_count((own != models.IGNORE_INDEX).sum().item(), group)
        loss = models.loss(model(tokens), own) / count
        optimizer.zero_grad()
        loss.backward()
        all_reduce_bucketed(model, group)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    others = dict(alone_layers.named_parameters())
    weights = max(
        (param - others[name]).abs().max().item() for name, param in model.named_parameters()
    )
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return difference, weights, expected[0] - expected[-1]


@pytest.mark.parametrize(
    ("ranks", "way", "order"),
    [
        (2, "ring", "plain"),
        (3, "gathered", "head_tail"),
        (4, "ring", "head_tail"),
        (4, "ulysses", "head_tail"),
    ],
)
def test_training_is_that_of_one_process(five, ranks, way, order):
    for losses, weights, learnt in five.call(trained, ranks, way, order)[:ranks]:
        assert losses < 1e-11
        assert weights < 1e-11
        assert learnt > 0.1


def logits():
    """Of a copy, with attention="eager", whose mask is of no use here; and weights under the same
    names."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    tokens, _ = batch(0)
    expected = nn.Sequential(*gpt2())(tokens)
    layers = gpt2(attention="eager")
    names = nn.Sequential(*layers).state_dict().keys()
    model = nn.Sequential(*cut_sequence(layers, group))
    assert model.state_dict().keys() == names
    found = join_sequence(deepcopy(model)(tokens).detach(), group, dim=1)
    return (found - expected).abs().max().item()


def test_logits_and_names_are_those_of_one_process(five):
    assert max(five.call(logits)[:2]) < 1e-12


def with_hook(pick):
    layers = gpt2()
    pick(layers).register_forward_hook(lambda module, inputs, output: None)
    return layers


def with_forward():
    layers = gpt2()
    layers[1].block.attn.forward = layers[1].block.attn.forward
    return layers


def with_subclass():
    layers = gpt2()
    attention = layers[2].block.attn
    attention.__class__ = type("Scaled", (type(attention),), {})
    return layers


def refused():
    group, rank, found = first_ranks(2), dist.get_rank(), {}
    if rank >= 2:
        return None

    def attempt(what, function, *args, **options):
        with pytest.raises((TypeError, ValueError)) as error:
            function(*args, **options)
        found[what] = str(error.value)

    attempt("dropout", cut_sequence, gpt2(dropout=0.1), group)
    attempt("order", cut_sequence, gpt2(), group, order="zigzag")
    attempt("layers", cut_sequence, models.mlp(2, 8), group)
    attempt("twice", cut_sequence, cut_sequence(gpt2(), group), group)
    attempt("hook", cut_sequence, with_hook(lambda layers: layers[2].block.attn), group)
    attempt("hook at the embedding", cut_sequence, with_hook(lambda layers: layers[0]), group)
    attempt("hook at a dropout", cut_sequence, with_hook(lambda layers: layers[0].drop), group)
    attempt("forward", cut_sequence, with_forward(), group)
    attempt("subclass", cut_sequence, with_subclass(), group)
    attempt("wrapped", cut_sequence, [gpt2()[0], *map(Recompute, gpt2()[1:])], group)
    model = nn.Sequential(*cut_sequence(gpt2(), group))
    tokens, _ = batch(0)
    attempt("divide", model, tokens[:, :7])
    attempt("tokens", model, tokens + rank)
    attempt("lengths", model, tokens[:, : 4 + 2 * rank])
    attempt("mask", model, (tokens, torch.ones_like(tokens)))
    attempt("mask on one", model, (tokens, torch.ones_like(tokens)) if rank else tokens)
    attempt("positions", model, torch.cat([tokens, tokens], 1))
    heads = nn.Sequential(*cut_sequence(gpt2(heads=1), group, attention=ulysses_attention))
    attempt("heads", heads, tokens)
    return found


def test_what_gpt2_refuses(five):
    first, second = five.call(refused)[:2]
    assert first == second
    expected = {
        "dropout": "0.drop has dropout of 0.1: make the model with dropout=0.0",
        "order": "order must be one of",
        "layers": "the first layer must be the embedding of models.gpt2",
        "twice": "the first layer must be the embedding of models.gpt2",
        "hook": "2.block.attn: the forward hook <lambda> would be lost, or get only",
        "hook at the embedding": "0: the forward hook <lambda> would be lost",
        "hook at a dropout": "0.drop: the forward hook <lambda> would be lost",
        "forward": "1.block.attn: its forward was replaced or compiled, and that would be lost",
        "subclass": "2.block.attn is a Scaled, whose own behaviour would be lost",
        "wrapped": "layer 1 is a Recompute, not a block or head of models.gpt2",
        "divide": "2 ranks do not divide a sequence of 7",
        "tokens": "rank 0 and rank 1 have different tokens",
        "lengths": "rank 0 and rank 1 have different tokens",
        "mask": "padding masks are not supported",
        "mask on one": "padding mask: False on rank 0, True on rank 1",
        "positions": "48 tokens, but the model has 24 positions",
        "heads": "2 ranks do not divide 1 key-value heads",
    }
    assert first.keys() == expected.keys()
    for what, words in expected.items():
        assert words in first[what], first[what]
