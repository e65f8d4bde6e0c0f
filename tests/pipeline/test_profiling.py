"""Profiles of layers that change what they take."""

import torch
from torch import nn

from naranhi.pipeline import profile


class Double(nn.Module):
    def forward(self, x):
        return x.mul_(2)


def test_layers_in_place_are_measured_and_the_inputs_stay():
    """Also right after a cut, where a layer's input would be a leaf of the graph."""
    x = torch.randn(3, 8)
    before = x.clone()
    layers = [Double(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)]
    profiles = profile(layers, x, repeats=2, warmup=1)
    assert [layer.output_bytes for layer in profiles] == [96, 96, 96, 48]
    assert all(layer.forward > 0 and layer.backward > 0 for layer in profiles[1:])
    assert torch.equal(x, before)
