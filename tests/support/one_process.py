"""Data-parallel training on ranks against one process: two models, shares of a batch, the gaps."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from naranhi import models

STEPS = 20
ROWS = (3, 2, 4, 1)  # of each rank: shares of unequal size


def squared_error(output, target):
    return (output - target).square().sum()


def mlp():
    return nn.Sequential(*models.mlp(3, 8, 16)), squared_error


def tied_gpt2():
    config = models.gpt2_config(vocabulary=50, positions=12, hidden=16, heads=2, blocks=1)
    return nn.Sequential(*models.gpt2(config, tied=True, dropout=0.0)), models.loss


MAKE = {"mlp": mlp, "tied gpt2": tied_gpt2}
RATES = 3e-5, 1e-3
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    **{f"adamw {rate}": partial(torch.optim.AdamW, lr=rate) for rate in RATES},
}


def share(work, step, rank, rows=None):
    """(inputs, targets, how many of these are valid) of a rank in a step.

    GPT-2 as `transformers` has it does not take a batch of no rows: a row without targets serves.
    """
    if rows == 0 and work == "tied gpt2":
        tokens, targets, _ = share(work, step, rank, 1)
        return tokens, torch.full_like(targets, models.IGNORE_INDEX), 0
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = ROWS[rank] if rows is None else rows
    if work == "mlp":
        inputs, targets = torch.randn(2, rows, 8, generator=generator)
        return inputs, targets, targets.numel()
    tokens = torch.randint(50, (rows, 10), generator=generator)
    mask = torch.arange(10) < torch.randint(3, 11, (rows, 1), generator=generator)
    targets = tokens.roll(-1, 1).masked_fill(~mask, models.IGNORE_INDEX)
    return (tokens, mask.long()), targets, int(mask.sum())


def largest_differences(one, other):
    """Of the parameters, and of those whose gradient is zero but for rounding, apart: attention
    does not change when all its keys are moved by the same, so a bias of the keys learns nothing.
    (Adam divides a gradient by its own size, and so makes whole steps of that rounding.)"""
    idle = real = 0.0
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        gaps = (a - b).detach().abs()
        if name.endswith("c_attn.bias"):  # of queries, keys and values
            gaps = gaps.view(3, -1)
            idle = max(idle, gaps[1].max().item())
            gaps = gaps[[0, 2]]
        real = max(real, gaps.max().item())
    return real, idle


def same_bits_everywhere(model, group):
    flat = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    table = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, flat, group=group)
    return all(torch.equal(row, flat) for row in table)


def alone(ranks, work, optimizer, clip=None):
    """One process that accumulates the shares of the ranks, in their order."""
    torch.manual_seed(0)
    model, loss = MAKE[work]()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        shares = [share(work, step, rank) for rank in range(ranks)]
        count = sum(valid for _, _, valid in shares)
        stepper.zero_grad()
        for inputs, targets, _ in shares:
            (loss(model(inputs), targets) / count).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
    return model
