"""The models, batches and optimizers of the gallery: as small as a bug needs.

They are on the device of the ranks' backend, with values that the CPU's generator draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from naranhi import models
from naranhi.distributed import device_of
from naranhi.tensor_parallel.shards import as_module

RATE = 0.1  # of SGD, which shows a gradient that is wrong by a factor
ROWS, LENGTH, HIDDEN, WORDS = 8, 12, 8, 32


def mlp() -> list[nn.Module]:
    """Return an MLP of two blocks, the same on every rank."""
    torch.manual_seed(0)
    return on_device(models.mlp(2, HIDDEN))


def on_device(layers: list[nn.Module]) -> list[nn.Module]:
    """Move layers to this rank's device, and return them."""
    nn.ModuleList(layers).to(device_of())
    return layers


def regression(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a step, (ROWS, HIDDEN) each: the targets of a fixed map."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, HIDDEN, generator=generator).to(device_of())
    return inputs, inputs.roll(1, -1).tanh()


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of squared differences."""
    return (output - target).square().sum()


def gpt2(dropout: float = 0.0) -> list[nn.Module]:
    """Return a GPT-2 of two blocks, with tied weights, the same on every rank."""
    torch.manual_seed(0)
    config = models.gpt2_config(
        vocabulary=WORDS, positions=LENGTH, hidden=HIDDEN, heads=4, blocks=2
    )
    return on_device(models.gpt2(config, tied=True, dropout=dropout))


def text(step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a step's tokens and targets, (ROWS, LENGTH) each, and the number of valid targets.

    The next token is the last one plus 1, so there is something to learn; rows differ in length.
    """
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (ROWS, 1), generator=generator)
    tokens = (start + torch.arange(LENGTH)) % WORDS
    lengths = torch.arange(ROWS)[:, None] % LENGTH + 1
    targets = ((tokens + 1) % WORDS).masked_fill(
        torch.arange(LENGTH) >= lengths, models.IGNORE_INDEX
    )
    count = int((targets != models.IGNORE_INDEX).sum())
    return tokens.to(device_of()), targets.to(device_of()), count


def forward(layers: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """Return the output of the last layer."""
    for layer in layers:
        x = layer(x)
    return x


def regression_alone(layers: Sequence[nn.Module], step: int) -> float:
    """Run a step of regression in one process."""
    inputs, targets = regression(step)
    loss = squared_error(forward(layers, inputs), targets) / targets.numel()
    loss.backward()
    return loss.item()


def text_alone(layers: Sequence[nn.Module], step: int) -> float:
    """Run a step of language modelling in one process."""
    tokens, targets, count = text(step)
    loss = models.loss(forward(layers, tokens), targets) / count
    loss.backward()
    return loss.item()


def sgd(model: nn.Module | list[nn.Module]) -> None:
    """Step SGD over a model's parameters."""
    torch.optim.SGD(as_module(model).parameters(), lr=RATE).step()


def total(loss: torch.Tensor | None) -> float:
    """Return the sum of the ranks' losses; None counts as 0."""
    value = torch.tensor(0.0 if loss is None else loss.item(), device=device_of())
    dist.all_reduce(value)
    return value.item()
