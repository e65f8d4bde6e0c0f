"""A pipeline against one process that loops over the micro-batches: models, both, the gaps."""

import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.nn import functional as F

from naranhi import models, pipeline


def squared_error(output, target):
    return (output - target).square().sum()


def cross_entropy(logits, tokens):
    """Of each token's successor, where that is not padding."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


class Both(nn.Module):
    """Takes and returns a tuple: numbers that have a gradient, whole ones that have none, and a
    third that nothing uses later on."""

    def __init__(self, width, first):
        super().__init__()
        self.linear, self.first = nn.Linear(width, width), first

    def forward(self, value):
        x, index, unused = (value, torch.arange(len(value)), value * 2) if self.first else value
        return self.linear(x)[index], index, unused


class First(nn.Module):
    def forward(self, value):
        return value[0]


class Named(nn.Module):
    def forward(self, x):
        return {"x": x}


def mlp(blocks=5):
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, 24, 8, generator=generator)
    return models.mlp(blocks, 8, 16), squared_error, inputs, targets, 24 * 8


def tuples():
    generator = torch.Generator().manual_seed(2)
    inputs, targets = torch.randn(2, 24, 8, generator=generator)
    layers = [Both(8, True), Both(8, False), Both(8, False), First(), nn.Linear(8, 8)]
    return layers, squared_error, inputs, targets, 7


def gpt2(tied):
    config = models.gpt2_config(vocabulary=50, positions=12, hidden=16, heads=2, blocks=3)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(50, (12, 10), generator=generator)
    mask = torch.arange(10) < torch.randint(3, 11, (12, 1), generator=generator)
    targets = tokens.masked_fill(~mask, -100)
    count = int((targets[:, 1:] != -100).sum())
    layers = models.gpt2(config, tied=tied, dropout=0.0)
    return layers, cross_entropy, (tokens, mask.long()), targets, count


WORK = {"mlp": mlp, "tuples": tuples, "gpt2": lambda: gpt2(False), "tied gpt2": lambda: gpt2(True)}


def make(work, *args):
    torch.manual_seed(0)
    return WORK[work](*args)


def plain_loop(work, microbatches, steps=1, *args):
    """(loss, gradients by layer) of one process that takes a micro-batch after the other."""
    layers, loss, inputs, targets, count = make(work, *args)
    several = isinstance(inputs, tuple)
    parts = [x.chunk(microbatches) for x in (inputs if several else (inputs,))]
    for _ in range(steps):
        total = None
        for k, target in enumerate(targets.chunk(microbatches)):
            value = tuple(part[k] for part in parts) if several else parts[0][k]
            one = loss(nn.Sequential(*layers)(value), target) / count
            one.backward()
            total = one.detach() if total is None else total + one.detach()
    return total, [[parameter.grad for parameter in layer.parameters()] for layer in layers]


def differences(ranks, schedule, work, balance=None, steps=1, args=(), prepare=list, overlap=None):
    """By rank, the largest difference to the plain loop of each parameter that differs in any bit:
    {(layer, number): difference}; ("loss", 0) for the loss."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        pipeline.join_group_creation()
        return {}
    expected_loss, expected = plain_loop(work, schedule.microbatches, steps, *args)
    layers, loss, inputs, targets, count = make(work, *args)
    layers = prepare(layers)
    if rank:  # what a rank does not need, it need not have
        meta = tuple if isinstance(inputs, tuple) else (lambda parts: next(iter(parts)))
        inputs = meta(
            torch.empty_like(x, device="meta")
            for x in (inputs if isinstance(inputs, tuple) else (inputs,))
        )
    if rank != schedule.placement[-1]:
        targets = None
    with pipeline.Pipeline(
        layers, schedule, loss, balance=balance, group=group, overlap=overlap
    ) as pipe:
        for _ in range(steps):
            found_loss = pipe.step(inputs, targets, count)
        mine = [
            list(layer.parameters()) for stage in pipe.stages.values() for layer in stage.layers
        ]
        numbers = [
            stage.first + i for stage in pipe.stages.values() for i in range(len(stage.layers))
        ]
    wrong = {}
    if rank == schedule.placement[-1]:
        if not torch.equal(found_loss, expected_loss):
            wrong["loss", 0] = (found_loss - expected_loss).item()
    else:
        assert found_loss is None
    for number, parameters in zip(numbers, mine, strict=True):
        assert len(parameters) == len(expected[number])
        for i, parameter in enumerate(parameters):
            if not torch.equal(parameter.grad, expected[number][i]):
                gap = (parameter.grad - expected[number][i]).abs().max()
                wrong[number, i] = gap.item()
    return wrong
