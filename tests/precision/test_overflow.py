"""The operation that first returns infinity or NaN."""

import torch
from torch import nn

from naranhi.precision import NonFinite, first_nonfinite


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return x + self.inner(x)


def model():
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), Residual(), nn.Linear(4, 4, bias=False))
    for param in layers.parameters():
        nn.init.eye_(param)
    return layers.half()


def test_a_product():
    layers = model()
    with torch.no_grad():
        layers[1].inner.weight.fill_(30_000)
    found = first_nonfinite(layers, torch.ones(2, 4, dtype=torch.float16))
    assert found == NonFinite("1.inner", "aten.mm.default", "inf", 30_000.0)


def test_a_residual_is_its_module_s_own():
    found = first_nonfinite(model(), torch.full((2, 4), 40_000.0, dtype=torch.float16))
    assert found == NonFinite("1", "aten.add.Tensor", "inf", 40_000.0)


def test_nan():
    class Zero(nn.Module):
        def forward(self, x):
            return (x - x) / (x - x)

    found = first_nonfinite(nn.Sequential(nn.Identity(), Zero()), torch.ones(2))
    assert found == NonFinite("1", "aten.div.Tensor", "nan", 0.0)


def test_all_finite_and_nothing_left_behind():
    layers = model()
    assert first_nonfinite(layers, torch.ones(2, 4, dtype=torch.float16)) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers.modules())


def test_hooks_are_removed_after_an_error():
    layers = model()
    try:
        first_nonfinite(layers, torch.ones(2, 5, dtype=torch.float16))
    except RuntimeError as error:
        assert "mat1 and mat2" in str(error)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layers.modules())


def test_a_shared_module_and_inputs_that_are_not_finite():
    layer = nn.Linear(4, 4, bias=False)
    assert first_nonfinite(nn.Sequential(layer, layer), torch.full((1, 4), float("nan"))) is None


def test_the_first_of_two():
    class Twice(nn.Module):
        def forward(self, x):
            return x * x, x + x

    found = first_nonfinite(Twice(), torch.full((2,), 40_000.0, dtype=torch.float16))
    assert found == NonFinite("", "aten.mul.Tensor", "inf", 40_000.0)
