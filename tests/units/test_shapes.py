"""Layers tried on shapes: what comes out is told, and nothing of them changes."""

import torch
from torch import nn

from naranhi import shapes


def after(layers, *shape):
    return shapes.after(layers, shapes.Boundary.of(torch.empty(shape)))


def test_a_trial_changes_nothing():
    """Not even a batch norm's count of batches, a single number."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)), nn.Dropout(0.5)]
    before = [one.clone() for one in nn.ModuleList(layers).state_dict().values()]
    random = torch.get_rng_state()
    assert after(layers, 5, 4) == shapes.Boundary.of(torch.empty(5, 1, requires_grad=True))
    assert torch.equal(torch.get_rng_state(), random)
    for one, other in zip(nn.ModuleList(layers).state_dict().values(), before, strict=True):
        assert torch.equal(one, other)


class Scale(nn.Module):
    """Has a buffer and no parameter."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("factor", torch.ones(4, device=device))

    def forward(self, x):
        return x * self.factor


def test_the_trial_is_on_the_device_of_the_layers_though_they_have_no_parameter():
    assert after([Scale("meta")], 5, 4) == shapes.Boundary.of(torch.empty(5, 4))
