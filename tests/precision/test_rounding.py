"""Stochastic rounding: between two neighbours, without bias."""

import math

import pytest
import torch

from naranhi.precision import stochastic_round


def seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-5, 1234.5, 0.999, -7e20])
def test_the_mean_is_the_value(value):
    many = torch.full((200_000,), value)
    rounded = stochastic_round(many, seeded())
    assert rounded.dtype == torch.bfloat16
    low, high = rounded.double().unique().tolist()
    exact = many[0].item()
    assert low < exact < high
    chance = (exact - low) / (high - low)
    error = (high - low) * math.sqrt(chance * (1 - chance) / len(many))
    assert abs(rounded.double().mean().item() - exact) < 4 * error


def test_neighbours_only():
    many = torch.randn(10_000, generator=seeded())
    rounded = stochastic_round(many, seeded()).float()
    spacing = 2.0 ** (many.abs().log2().floor() - 7)
    assert ((rounded - many).abs() < spacing).all()
    assert not torch.equal(rounded, many.bfloat16().float())


def test_what_bf16_can_hold_stays():
    held = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-130, float("inf"), -float("inf")])
    assert torch.equal(stochastic_round(held).float(), held)
    nan = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert stochastic_round(nan).isnan().all(), "whatever the lower bits of a NaN are"


def test_a_seed_decides():
    many = torch.randn(3, 100)
    assert torch.equal(stochastic_round(many, seeded()), stochastic_round(many, seeded()))
    assert stochastic_round(many.T, seeded()).shape == (100, 3)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"takes float32, not torch.float16"):
        stochastic_round(torch.ones(1, dtype=torch.float16))


def test_a_parameter_is_rounded_without_a_gradient():
    """It was one of zeros."""
    rounded = stochastic_round(torch.nn.Parameter(torch.randn(4)))
    assert not rounded.requires_grad and rounded.grad_fn is None
