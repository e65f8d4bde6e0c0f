"""Layers tried on shapes: what comes out is told, and nothing of them changes."""

import functools
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from naranhi.autograd import FunctionLayer
from naranhi.pipeline import shape_inference as shapes
from naranhi.pipeline.dry_run import copied


def after(layers, *shape, **options):
    return shapes.infer(layers, shapes.StageSignature.of(torch.empty(shape, **options)))


def test_a_trial_changes_nothing():
    """Not even a batch norm's count of batches, a single number."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)), nn.Dropout(0.5)]
    before = [one.clone() for one in nn.ModuleList(layers).state_dict().values()]
    random = torch.get_rng_state()
    assert after(layers, 5, 4) == shapes.StageSignature.of(torch.empty(5, 1, requires_grad=True))
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
    assert after([Scale("meta")], 5, 4) == shapes.StageSignature.of(torch.empty(5, 4))


def test_the_trial_of_layers_without_tensors_is_on_the_device_of_the_pipeline():
    seen, signature = [], shapes.StageSignature.of(torch.empty(5, 4))
    layers = [FunctionLayer(lambda x: seen.append(x.device.type) or x)]
    shapes.infer(layers, signature)
    shapes.infer(layers, signature, device=torch.device("meta"))
    assert seen == ["cpu", "meta"]


# --- layers of many kinds ------------------------------------------------------------------------


class Apply(nn.Module):
    """A linear layer and a function of it and its input."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.linear, x)


def penalty(linear, x):
    """A gradient in the forward, which has a graph itself."""
    y = linear(x.requires_grad_()).tanh()
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y + gradient


KINDS = {
    "in place": lambda: nn.ReLU(inplace=True),
    "a checkpoint": lambda: Apply(lambda linear, x: checkpoint(linear, x, use_reentrant=False)),
    "a gradient": lambda: Apply(penalty),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="eager"),
    "an older weight norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "a spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_layers_of_many_kinds(kind):
    """Tried without values, on values, and run: the same; and nothing of a trial stays."""
    layer, x = KINDS[kind](), torch.randn(5, 4)
    takes = shapes.StageSignature.of(x.clone().requires_grad_())
    state = {name: one.clone() for name, one in layer.state_dict().items()}
    references = [weakref.ref(one) for one in layer.parameters()]
    signature, given = shapes.StageSignature.of, x.clone().requires_grad_()
    expected = signature(copied([layer])[0](takes.value([given])))
    assert shapes.infer([layer], takes) == expected
    found, (y,) = shapes.infer_data([layer], takes, [x])
    assert found == expected
    assert tuple(y.shape) == expected.specs[0].shape
    assert all(torch.equal(one, state[name]) for name, one in layer.state_dict().items())
    del layer, y
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


class Locked(nn.Module):
    """Nobody can copy a lock: the copy has the same one."""

    def __init__(self):
        super().__init__()
        self.linear, self.lock, self.calls = nn.Linear(4, 4), threading.Lock(), [0]

    def forward(self, x):
        with self.lock:
            self.calls[0] += 1
            return self.linear(x)


class Slope(nn.Module):
    """The gradient of a function of x, by torch.func, which takes no hooks for saved tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.func.grad(lambda y: self.linear(y).tanh().sum())(x)


def test_layers_that_differentiate_by_torch_func_are_tried():
    layer, x = Slope(), torch.ones(5, 4)
    expected = shapes.StageSignature.of(layer(x))
    takes = shapes.StageSignature.of(x)
    assert shapes.infer([layer], takes) == expected
    found, [value] = shapes.infer_data([layer], takes, [x])
    assert found == expected
    torch.testing.assert_close(value, layer(x).detach())


def test_what_cannot_be_copied_is_shared_and_all_else_is_not():
    layer = Locked()
    (copy,) = copied([layer])
    assert copy.lock is layer.lock
    assert copy.linear.weight is not layer.linear.weight
    after([layer], 5, 4)
    assert layer.calls == [0]


def test_copies_share_what_the_layers_share():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    one, other = copied([first, last])
    assert one.weight is other.weight is not first.weight


# --- what is kept --------------------------------------------------------------------------------


class Hands(nn.Module):
    """Hands on what it has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(2, 4))
        self.tables = {4: [torch.ones(3)]}

    def forward(self, x):
        return x * self.weight, self.weight, self.mean[0], self.tables[4][0], x


def test_outputs_that_a_stage_keeps_are_known():
    found = after([Hands()], 5, 4)
    assert [spec.kept for spec in found.specs] == [False, True, True, True, False]
    assert [spec.requires_grad for spec in found.specs] == [True, True, False, False, False]


@functools.lru_cache
def table(rows):
    return torch.ones(rows, 1)


def test_a_tensor_that_a_cache_keeps_is_told_with_its_layer():
    table.cache_clear()
    layers = [nn.Linear(4, 4), Apply(lambda linear, x: x * table(len(x))), nn.Linear(4, 4)]
    with pytest.raises(
        ValueError,
        match=r"layer 4 \(Apply\) was tried on shapes, and a tensor of "
        r"torch.float32 \(5, 1\) that it made there, without values, is kept",
    ):
        shapes.infer(layers, shapes.StageSignature.of(torch.empty(5, 4)), first=3)
    table.cache_clear()
    table(5)  # made by somebody else, it is no matter
    found = shapes.infer(layers, shapes.StageSignature.of(torch.empty(5, 4)))
    assert found.specs[0].shape == (5, 4)


def test_an_output_without_values_is_an_error():
    with pytest.raises(
        TypeError,
        match=r"layer 2 \(Linear\) returned Tensor torch.float32 \(3,\) "
        "without values: it is on the meta device",
    ):
        shapes.require_values((torch.ones(3), torch.ones(3, device="meta")), 2, nn.Linear(1, 1))
    shapes.require_values((torch.ones(3), nn.Parameter(torch.ones(3))), 2, nn.Linear(1, 1))


@pytest.mark.parametrize(
    "value, fits",
    [
        (torch.ones(3, requires_grad=True), True),
        (torch.ones(3), True),  # and its gradient is dropped
        (torch.ones(4), False),
        (torch.ones(3, dtype=torch.float64), False),
        ((torch.ones(3),), False),
    ],
)
def test_what_may_be_sent(value, fits):
    boundary = shapes.StageSignature.of(torch.ones(3, requires_grad=True))
    if fits:
        boundary.require(value, 2, nn.Linear(1, 1))
    else:
        with pytest.raises(
            ValueError,
            match=r"layer 2 \(Linear\) returned .*, and torch.float32 "
            r"\(3,\) requiring a gradient when it was tried",
        ):
            boundary.require(value, 2, nn.Linear(1, 1))


def test_a_gradient_that_nobody_expects_is_an_error():
    with pytest.raises(ValueError, match=r"returned torch.float32 \(3,\) requiring a gradient"):
        shapes.StageSignature.of(torch.ones(3)).require(
            torch.ones(3, requires_grad=True), 2, nn.Linear(1, 1)
        )


def test_a_layer_may_change_in_place_what_it_takes():
    """And what an earlier stage of the rank has saved of it must not be used then."""
    given = torch.randn(3, requires_grad=True)
    saved = given.tanh()
    leaf = saved.detach().requires_grad_()
    takes = shapes.StageSignature.of(leaf)
    value = takes.value([leaf])
    takes.note_changes(value, [leaf])
    torch.autograd.grad(saved.sum(), given, retain_graph=True)
    value.relu_()
    takes.note_changes(value, [leaf])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(saved.sum(), given)


class Outside:
    """Keeps what cannot be copied without values: a storage."""

    def __init__(self):
        self.storage, self.calls = torch.zeros(3).untyped_storage(), 0

    def hook(self, module, inputs, output):
        self.calls += 1


def test_the_owner_of_a_hook_is_not_copied(caplog):
    """A copy would count beside it; and copying a storage without values is logged by torch."""
    layer, outside = nn.Linear(2, 2), Outside()
    layer.register_forward_hook(outside.hook)
    shapes.infer([layer], shapes.StageSignature.of(torch.zeros(1, 2)))
    assert outside.calls == 1
    assert not caplog.records
