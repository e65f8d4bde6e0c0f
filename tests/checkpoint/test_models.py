"""What a model may be made of: what is saved, where, and what is refused."""

import pytest
import torch
from checkpointed import refusal
from torch import nn

from naranhi.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def one(eight):
    """`one(function, *args)`: its result on a world of one rank."""
    return lambda function, *args: eight(1, function, *args)[0]


def in_columns(folder, options):
    """How far weights that are not row-major get from those of a training without a break."""

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4, 5))
        model.to(memory_format=torch.channels_last)
        model[3].weight.data = model[3].weight.data.t().contiguous().t()
        return model, torch.optim.Adam(model.parameters(), lr=0.01, **options)

    def train(model, optimizer, steps):
        for seed in steps:
            inputs = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    whole, resumed = made(), made()
    train(*whole, range(2))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(2, *whole)
        checkpoints.load(*resumed)
    train(*whole, range(2, 4))
    train(*resumed, range(2, 4))
    pairs = zip(whole[0].parameters(), resumed[0].parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_adam_goes_on_with_weights_that_are_not_row_major(one, tmp_path, options):
    assert one(in_columns, str(tmp_path), options) == 0
