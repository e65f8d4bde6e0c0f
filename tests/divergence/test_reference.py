"""One process's step, and how exactly it is known."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from naranhi import divergence, models
from naranhi.autograd import Recompute
from naranhi.divergence.random_states import random_states, same_states
from naranhi.divergence.recorder import Key


def layers():
    torch.manual_seed(0)
    return models.mlp(2, 4)


def step(microbatches=1, rows=6):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, rows, 4, generator=generator)

    def run(layers):
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            for layer in layers:
                x = layer(x)
            (x - y).square().sum().backward()

    return run, inputs


def sgd(layers):
    torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.5).step()


def test_values_are_float64_s_and_noise_is_the_distance_of_float32():
    run, inputs = step()
    reference = divergence.trace(layers(), run, update=sgd)
    exact, single = layers(), layers()
    nn.ModuleList(exact).double()
    whole = (exact[0].up(inputs.double()), single[0].up(inputs))
    key = Key("forward", "0.up")
    assert torch.equal(reference.values[key], whole[0])
    assert reference.noise[key] == (whole[0] - whole[1]).abs().max().item()
    assert 0 < reference.noise[key] < 1e-6
    largest = whole[0].abs().max().item()
    expected = divergence.TOLERANCE * reference.noise[key] + 2**-23 * largest
    assert reference.allowed(key._replace(microbatch=3)) == expected

    run([lambda x: x.double(), *exact])
    for name, param in nn.ModuleList(exact).named_parameters():
        assert torch.equal(reference.values[Key("gradient", name)], param.grad)
        assert torch.equal(reference.values[Key("norm", name)], param.grad)
        assert torch.equal(reference.values[Key("weights", name)], param - 0.5 * param.grad)


def test_phases_come_in_the_order_of_a_step():
    run, _ = step()
    reference = divergence.trace(layers(), run, update=sgd)
    forward = [key.layer for key in reference.values if key.phase == "forward"]
    assert forward == ["0.up", "0.down", "0", "1.up", "1.down", "1"]
    backward = [key.layer for key in reference.values if key.phase == "backward"]
    assert backward == ["1", "1.down", "1.up", "0", "0.down", "0.up"]
    weights = [key.layer for key in reference.values if key.phase == "weights"]
    assert weights[:2] == ["1.down.bias", "1.down.weight"]
    assert list(dict.fromkeys(key.phase for key in reference.values)) == [
        "forward",
        "backward",
        "gradient",
        "norm",
        "weights",
    ]


def test_microbatches_are_one_batch():
    wholes = [divergence.trace(layers(), step(parts)[0]) for parts in (1, 3)]
    assert wholes[0].rows == wholes[1].rows == 6
    assert wholes[0].values.keys() == wholes[1].values.keys()
    for key, value in wholes[0].values.items():
        torch.testing.assert_close(value, wholes[1].values[key], rtol=1e-13, atol=1e-13)


def test_model_and_random_numbers_stay_as_they_were():
    model, (run, _) = layers(), step()
    before = [param.clone() for param in nn.ModuleList(model).parameters()]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    divergence.trace(model, lambda layers: (torch.rand(3), run(layers)), update=sgd)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(expected, torch.rand(1))
    torch.set_rng_state(state)
    for param, value in zip(nn.ModuleList(model).parameters(), before, strict=True):
        assert torch.equal(param, value) and param.grad is None
    assert not any(module._forward_hooks for module in nn.ModuleList(model).modules())


def test_a_step_that_draws_random_numbers_is_known():
    run, _ = step()
    model = layers()
    assert not divergence.trace(model, run).draws
    model.insert(1, nn.Dropout(0.5))
    assert divergence.trace(model, run).draws
    model[1].eval()
    assert not divergence.trace(model, run).draws


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_step_that_draws_from_another_generator_is_known_and_leaves_it(draw):
    class Scaled(nn.Module):
        def forward(self, x):
            return x * (1 + draw())

    run, _ = step()
    model = [*layers(), Scaled()]
    before = random_states()
    assert divergence.trace(model, run).draws
    assert same_states(before, random_states())


class DropsOnGpu(nn.Module):
    """Dropout that draws from a generator which is not the CPU's."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        return x * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


def test_a_step_that_draws_random_numbers_on_a_gpu_is_known(monkeypatch):
    """The test for a GPU itself is the part "divergence" of `device_parts`."""
    gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [gpu.get_state()])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: gpu.set_state(*states))
    run, _ = step()
    assert not divergence.trace(layers(), run).draws
    reference = divergence.trace([DropsOnGpu(gpu), *layers()], run)
    assert reference.draws
    key = Key("forward", "1")
    assert reference.noise[key] < 1e-4, "float64's step draws the same masks"


class Drops(nn.Module):
    """Dropout from a generator that the layer keeps; it may seed it itself in each forward."""

    def __init__(self, seeds):
        super().__init__()
        self.generator, self.seeds = torch.Generator().manual_seed(3), seeds

    def forward(self, x):
        if self.seeds:
            self.generator.manual_seed(5)
        return x * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


@pytest.mark.parametrize("seeds", [False, True])
def test_a_generator_that_a_layer_keeps(seeds):
    """Both runs draw the same, and the next step draws what it would have drawn."""
    run, _ = step()
    drops = Drops(seeds)
    before = drops.generator.get_state()
    reference = divergence.trace([*layers(), drops], run)
    assert reference.draws == (not seeds)
    assert 0 < reference.noise[Key("forward", "2")] < 1e-5
    assert seeds or torch.equal(before, drops.generator.get_state())


def test_a_generator_of_the_step_itself():
    generator = torch.Generator().manual_seed(3)
    _, inputs = step()

    def drawing(layers):
        kept = torch.rand(6, 1, generator=generator) < 0.5
        layers[0](inputs * kept).square().sum().backward()

    before = generator.get_state()
    reference = divergence.trace(layers(), drawing)
    assert reference.draws
    assert 0 < reference.noise[Key("forward", "0")] < 1e-5
    assert torch.equal(before, generator.get_state())


class Scaled(nn.Module):
    """x times a table's column, which does not depend on the rows of x."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, x):
        return x * self.table(torch.arange(6))[:1]


@pytest.mark.parametrize("microbatches, kind", [(1, 6), (2, None)])
def test_a_table_is_no_batch_but_by_chance(microbatches, kind):
    """A table of six rows looks like a batch of six, but not like two micro-batches of three."""
    run, _ = step(microbatches)
    reference = divergence.trace([Scaled()], run)
    key = Key("forward", "0.table")
    assert reference.by_rows.get(key) == kind
    assert reference.values[key].shape == (6, 4)
    assert (key._replace(phase="backward") in reference.values) == (microbatches == 1)


def test_tied_weights_have_one_name():
    tied = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
    tied[1].weight = tied[0].weight
    run, _ = step()
    reference = divergence.trace(tied, run)
    assert reference.parameters == {"0.weight": "0.weight", "1.weight": "0.weight"}
    assert [key.layer for key in reference.values if key.phase == "gradient"] == ["0.weight"]


def test_bfloat16_has_its_own_noise():
    run, _ = step()
    model = nn.ModuleList(layers()).bfloat16()
    half = divergence.trace([*model], lambda layers: run([nn.Identity(), *map(cast, layers)]))
    key = Key("forward", "0.up")
    assert 1e-4 < half.noise[key] < 1e-1


def cast(layer):
    return lambda x: layer(x.to(layer.up.weight.dtype))


def test_recomputed_layers_have_their_own_names():
    run, _ = step()
    plain = divergence.trace(layers(), run)
    whole = divergence.trace([*map(Recompute, layers())], run)
    assert whole.parameters == plain.parameters and whole.layers == plain.layers
    assert not any(key.phase == "backward" for key in whole.values)
    for key, value in whole.values.items():
        torch.testing.assert_close(value, plain.values[key], rtol=1e-13, atol=1e-13)


LOSSES = {
    "huber": F.huber_loss,
    "binary cross-entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "weighted cross-entropy": lambda x, y: F.cross_entropy(x, y.argmax(1), weight=y[0].abs()),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_refuses_targets_of_another_dtype(name, dtype):
    _, inputs = step()
    inputs = inputs.to(dtype)

    def run(layers):
        LOSSES[name](layers[0](inputs), inputs.flip(0)).backward()

    model = nn.ModuleList(layers()).to(dtype)
    reference = divergence.trace(list(model), run)
    exact = nn.ModuleList(layers()).double()
    LOSSES[name](exact[0](inputs.double()), inputs.double().flip(0)).backward()
    key = Key("gradient", "0.up.weight")
    torch.testing.assert_close(reference.values[key], exact[0].up.weight.grad)
    assert reference.noise[key] > 0


def test_a_run_without_a_layer():
    with pytest.raises(RuntimeError, match=r"run\(model\) has called no layer of the model"):
        divergence.trace(layers(), lambda layers: F.relu(torch.ones(1)))
