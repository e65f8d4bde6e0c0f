"""A small GPT-2 with experts on any ranks, and steps of it, as one process takes them."""

import torch
import torch.distributed as dist
from torch import nn

from naranhi import models
from naranhi.expert_parallel import add_experts, auxiliary_loss, sum_gradients

LENGTH, WORDS, EXPERTS = 10, 50, 4
ROWS = [3, 1, 4, 2]  # sequences of each rank
COEFFICIENT = 0.01


def gpt2(group, factor=None, replicas=None):
    torch.manual_seed(0)
    config = models.gpt2_config(WORDS, LENGTH, hidden=16, heads=2, blocks=4)
    layers = models.gpt2(config, tied=True, dropout=0.0)
    options = {"capacity_factor": factor, "replicas": replicas}
    return nn.Sequential(*add_experts(layers, EXPERTS, 2, group, **options))


def rows_of(rank, ranks):
    """A rank's share of the sequences. With fewer than four ranks, the last has the rest, too."""
    shares = [*ROWS[: ranks - 1], sum(ROWS[ranks - 1 :])]
    return slice(sum(shares[:rank]), sum(shares[: rank + 1]))


def backward(model, rows, everyone=None):
    """Gradients of a step with these rows of the batch, summed over `everyone`: the two losses."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(WORDS, (sum(ROWS), 1), generator=generator)
    tokens = (start + 3 * torch.arange(LENGTH + 1)) % WORDS  # there is something to learn
    inputs, targets = tokens[rows, :-1], tokens[rows, 1:]
    loss = models.loss(model(inputs), targets) / (sum(ROWS) * LENGTH)
    auxiliary = auxiliary_loss(model)
    (loss + COEFFICIENT * auxiliary).backward()
    loss = loss.detach()
    if everyone is not None:
        sum_gradients(model, everyone)
        dist.all_reduce(loss, group=everyone)
    return [loss.item(), auxiliary.item()]
