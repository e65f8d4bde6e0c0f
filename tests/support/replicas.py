"""Pipelines that are replicas of each other, against one process that takes share after share."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from naranhi import models


def squared_error(output, target):
    return (output - target).square().sum()


@functools.cache
def grid():
    """(this rank's pipeline, its replicas): {0, 2} and {1, 3} are pipelines."""
    rank = dist.get_rank()
    along, across = (
        [dist.new_group(ranks, group_desc="unchecked") for ranks in way]
        for way in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    )
    return along[rank % 2], across[rank // 2]


def make(work):
    """(layers, loss, inputs, targets, count): the same on every rank; shares of unequal count."""
    torch.manual_seed(0)
    if work == "mlp":
        x, y = torch.randn(2, 8, 16)
        return models.mlp(8, 16), squared_error, x, y, y.numel()
    layers = models.gpt2(
        models.gpt2_config(vocabulary=31, positions=8, hidden=8, heads=2, blocks=6),
        tied=work == "tied gpt2",
        dropout=0.0,
    )
    tokens = torch.randint(31, (16, 8))
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(16, 8) < 0.3, models.IGNORE_INDEX)
    return layers, models.loss, tokens, targets, int((targets != models.IGNORE_INDEX).sum())


def one_process(work, replicas, microbatches):
    """Gradients by layer, where each replica's share is summed up by itself, and they in order."""
    layers, loss, inputs, targets, count = make(work)
    model, total = nn.Sequential(*layers), None
    for share in zip(inputs.chunk(replicas), targets.chunk(replicas), strict=True):
        model.zero_grad()
        for x, y in zip(*(part.chunk(microbatches) for part in share), strict=True):
            (loss(model(x), y) / count).backward()
        mine = [[one.grad for one in layer.parameters()] for layer in layers]
        total = (
            mine
            if total is None
            else [
                [a + b for a, b in zip(*pair, strict=True)]
                for pair in zip(total, mine, strict=True)
            ]
        )
    return total
