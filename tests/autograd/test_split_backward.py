"""Layers whose backward is split, and recomputed ones: what is around their arithmetic."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from naranhi import models
from naranhi.autograd import Recompute, Splittable, splittable
from naranhi.autograd.splitting import not_splittable

WIDTH = 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def split_backward_of(loss, model):
    """Run the inputs' part of a backward, then the weights' part."""
    later = []
    layers = [module for module in model.modules() if isinstance(module, Splittable)]
    for layer in layers:
        layer.defer = later.append
    try:
        loss.backward()
    finally:
        for layer in layers:
            layer.defer = None
    for add_gradients in later:
        add_gradients()


def gradients_of(model):
    return [param.grad for param in model.parameters()]


def assert_equal_gradients(model, plain):
    for grad, expected in zip(gradients_of(model), gradients_of(plain), strict=True):
        assert (grad is None) == (expected is None)
        assert grad is None or torch.equal(grad, expected)


# --- the arithmetic of a linear layer ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_linear_layer_of_any_dtype_and_number_of_rows(dtype, rows):
    plain, x = nn.Linear(WIDTH, 2, dtype=dtype), torch.randn(rows, WIDTH, dtype=dtype)
    (layer,) = splittable([copy.deepcopy(plain)])
    xs = [x.clone().requires_grad_() for _ in range(2)]
    plain(xs[0]).abs().sum().backward()
    split_backward_of(layer(xs[1]).abs().sum(), layer)
    torch.testing.assert_close(xs[1].grad, xs[0].grad)
    for grad, expected in zip(gradients_of(layer), gradients_of(plain), strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("split", [False, True])
def test_a_linear_layer_without_autocast_in_a_backward_with_it(split):
    """As a head that is kept in fp32 has it, if a step as a whole is under autocast."""
    plain, x = nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH)
    (layer,) = splittable([copy.deepcopy(plain)])
    xs = [x.clone().requires_grad_() for _ in range(2)]
    plain(xs[0]).square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            loss = layer(xs[1]).square().sum()
        split_backward_of(loss, layer) if split else loss.backward()
    assert torch.equal(xs[1].grad, xs[0].grad)
    for grad, expected in zip(gradients_of(layer), gradients_of(plain), strict=True):
        torch.testing.assert_close(grad, expected)


def test_a_gradient_has_the_strides_of_its_weight():
    """Fused optimizers read both in the order of memory, whatever their strides."""
    plain = nn.Linear(WIDTH, WIDTH)
    plain.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    (layer,) = splittable([copy.deepcopy(plain)])
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        split_backward_of(layer(x).square().sum(), layer)
        plain(x).square().sum().backward()
    assert layer.weight.grad.stride() == layer.weight.stride() == (1, WIDTH)
    for model in (plain, layer):
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    torch.testing.assert_close(layer.weight, plain.weight)


def test_layers_without_values_are_split():
    """On torch's "meta" device, which has no autocast."""
    with torch.device("meta"):
        model, x = (
            nn.Sequential(models.MLPBlock(WIDTH, 8), nn.LayerNorm(WIDTH)),
            torch.ones(2, WIDTH),
        )
    splittable([model])
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x.requires_grad_()).sum()
    split_backward_of(loss, model)
    assert all(grad.is_meta for grad in [x.grad, *gradients_of(model)])


# --- a module stays what it is -------------------------------------------------------------------


def test_a_splittable_module_keeps_its_identity_names_and_attributes():
    model = nn.Sequential(models.MLPBlock(WIDTH, 8), nn.LayerNorm(WIDTH))
    before = dict(model.named_modules())
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    (split,) = splittable([model])
    assert split is model
    assert dict(model.named_modules()) == before
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert isinstance(model[0].up, nn.Linear) and model[0].up.out_features == 8
    assert isinstance(model[1], nn.LayerNorm) and model[1].normalized_shape == (WIDTH,)
    assert not not_splittable(model)
    assert splittable([model])[0] is model


@pytest.mark.parametrize("wrap", [Recompute, Splittable, lambda layer: Recompute(Recompute(layer))])
def test_a_wrapped_layer_is_read_saved_and_loaded_as_the_layer(wrap):
    """Also where it has a child that is called `layer`, as the wrapper has."""

    class Inner(nn.Module):
        kind = "inner"

        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return self.norm(self.layer(x))

    plain, other = nn.Sequential(Inner(), nn.Tanh()), Inner()
    wrapped = nn.Sequential(wrap(other), nn.Tanh())
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    plain.load_state_dict(wrapped.state_dict())
    for name, tensor in plain[0].state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert wrapped[0].norm is other.norm and wrapped[0].kind == "inner"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wrapped[0].nothing
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict({})
    duplicate = copy.deepcopy(wrapped)
    assert type(duplicate[0]) is type(wrapped[0])
    assert duplicate[0].norm is not other.norm


def test_a_copy_of_a_splittable_module_is_splittable_by_itself():
    (model,) = splittable([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))])
    plain, x = copy.deepcopy(model), torch.randn(2, WIDTH)
    plain(x).square().sum().backward()
    split_backward_of(model(x).square().sum(), model)
    assert_equal_gradients(model, plain)


def test_a_block_may_read_the_weight_of_a_child():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(7, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, tokens):
            return F.linear(self.norm(self.embedding(tokens)), self.embedding.weight)

    plain, tokens = Tied(), torch.tensor([[1, 5, 1]])
    (split,), wrapped = splittable([copy.deepcopy(plain)]), copy.deepcopy(plain)
    wrapped.embedding = Recompute(wrapped.embedding)
    plain(tokens).square().sum().backward()
    wrapped(tokens).square().sum().backward()
    assert_equal_gradients(wrapped, plain)
    split_backward_of(split(tokens).square().sum(), split)
    for grad, expected in zip(gradients_of(split), gradients_of(plain), strict=True):
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-5)


# --- backwards of other kinds --------------------------------------------------------------------


def test_a_gradient_may_be_asked_for_without_adding_it():
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    (split,), x = splittable([copy.deepcopy(plain)]), torch.randn(2, WIDTH, requires_grad=True)
    grads = [
        torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
        for model in (plain, split)
    ]
    assert all(map(torch.equal, *grads))
    assert gradients_of(split) == [None] * 4


@pytest.mark.parametrize("wrap", [Recompute, lambda layer: splittable([layer])[0]])
def test_a_graph_that_is_kept_can_be_gone_back_through_again(wrap):
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    model, x = wrap(copy.deepcopy(plain)), torch.randn(2, WIDTH)
    for one in (plain, model):
        loss = one(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal_gradients(model, plain)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("wrap", [Recompute, lambda layer: splittable([layer])[0]])
def test_a_derivative_of_a_gradient_is_refused(wrap):
    model, x = wrap(nn.LayerNorm(WIDTH)), torch.randn(2, WIDTH, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_recomputed_layers_are_split_in_either_order():
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    seen, x = [], torch.randn(2, WIDTH)
    for one in (0, 1, 2):
        plain[one].bias.register_hook(lambda grad, one=one: seen.append((one, grad)))
    loss = plain(x).square().sum()
    state = copy.deepcopy(plain.state_dict())
    loss.backward()
    expected, grads, seen[:] = sorted(seen), gradients_of(plain), []

    class Both(nn.Module):
        """Split as a whole, as it has a weight, with a recomputed layer in it."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.zero = Recompute(inner), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.inner(x) + self.zero

    for wrap in (Recompute, Both):
        plain.zero_grad()
        plain.load_state_dict(state)
        (model,) = splittable([wrap(plain)])
        split_backward_of(model(x).square().sum(), model)
        assert all(map(torch.equal, gradients_of(plain), grads)), wrap
        assert [(key, grad.tolist()) for key, grad in sorted(seen)] == [
            (key, grad.tolist()) for key, grad in expected
        ]
        seen.clear()


# --- parameters that get no gradient -------------------------------------------------------------


class Unused(nn.Module):
    """Of its two layers it uses the first only, or none."""

    def __init__(self, uses=1):
        super().__init__()
        self.used, self.idle = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.uses = nn.Parameter(torch.ones(WIDTH)), uses

    def forward(self, x):
        return self.used(x) * self.scale if self.uses else x * 1


@pytest.mark.parametrize("uses", [0, 1])
@pytest.mark.parametrize("wrap", [Recompute, Splittable, lambda layer: splittable([layer])[0]])
def test_hooks_of_a_parameter_without_gradient_do_not_run(wrap, uses):
    """Torch runs them on None when a Function returns none."""
    inner, seen, x = Unused(uses), [], torch.randn(2, WIDTH, requires_grad=True)
    for name, param in inner.named_parameters():
        param.register_hook(lambda grad, name=name: seen.append(name))
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: seen.append(f"sum of {name}")
        )
    inner(x).sum().backward()
    expected, seen[:] = sorted(seen), []
    model = wrap(inner)
    for _ in range(2):
        model(x).sum().backward()
        assert sorted(seen) == expected
        seen.clear()
        if isinstance(model, Splittable):
            split_backward_of(model(x).sum(), model)
            assert sorted(seen) == expected
            seen.clear()


def test_another_use_of_the_parameter_still_runs_its_hooks():
    inner, seen, x = Unused(), [], torch.randn(2, WIDTH, requires_grad=True)
    inner.idle.bias.register_hook(seen.append)
    (Recompute(inner)(x).sum() + inner.idle.bias.sum()).backward()
    assert [grad.tolist() for grad in seen] == [[1.0] * WIDTH]


def test_hooks_run_again_after_a_backward_that_failed():
    model, seen, x = nn.Sequential(nn.LayerNorm(WIDTH)), [], torch.randn(2, WIDTH)
    splittable([model])
    model[0].weight.register_hook(seen.append)
    x.requires_grad_().register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        split_backward_of(model(x).sum(), model)
    seen.clear()
    model(x.detach()).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("make", [lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH)])
def test_a_split_backward_that_is_given_up_keeps_no_parameter(make):
    """Its hooks wait for a gradient that does not come."""
    (layer,), later = splittable([make()]), []
    layer.weight.register_hook(lambda grad: grad)
    layer.defer = later.append
    layer(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    weight = weakref.ref(layer.weight)
    del layer, later
    gc.collect()
    assert weight() is None


# --- parameters that layers share -----------------------------------------------------------------


class Chain(nn.Module):
    """Four layers: the first and the third share a weight, the third and the last a bias."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.LayerNorm(WIDTH)
        )
        self.layers[2].weight = self.layers[0].weight
        self.layers[3].bias = self.layers[2].bias

    def forward(self, x):
        return self.layers(self.layers(x).tanh())


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: splittable([model])[0],
        lambda model: splittable([nn.Sequential(*splittable(list(model.layers))), model])[1],
        lambda model: copy.deepcopy(splittable([model])[0]),
    ],
)
def test_hooks_of_a_shared_parameter_see_its_whole_gradient(prepare):
    """And gradients are those of a whole backward to the bit, summed before they are added."""
    seen, results = [], []
    for way in (lambda model: model, prepare):
        torch.manual_seed(0)
        model = way(Chain())
        for name, param in model.named_parameters():
            param.register_hook(
                lambda grad, name=name: seen.append((name, grad)) or grad.clamp(-1, 1)
            )
        for k in range(2):
            loss = model(torch.randn(2, WIDTH) + k).square().sum()
            split_backward_of(loss, model)
        results.append((sorted((name, grad.tolist()) for name, grad in seen), gradients_of(model)))
        seen.clear()
    (notes, expected), (split_notes, found) = results
    assert split_notes == notes and len(notes) == 2 * 6
    assert all(map(torch.equal, found, expected))


# --- what is refused -----------------------------------------------------------------------------


def refused(model, x, error, words):
    with pytest.raises(error, match=words):
        split_backward_of(model(x).sum(), model)


def test_an_old_backward_hook_is_refused():
    (model,) = splittable([nn.Sequential(nn.Linear(WIDTH, WIDTH))])
    model[0].register_backward_hook(lambda *_: None)
    refused(
        model,
        torch.randn(2, WIDTH),
        TypeError,
        r"layer 0.0 \(Linear\) has a hook of register_backward_hook, .*full_backward_hook",
    )


def test_a_hook_of_a_parameter_that_is_used_outside_of_its_layer_is_refused():
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x) @ self.linear.weight

    (model,) = splittable([Outside()])
    model.linear.weight.register_hook(lambda grad: grad * 0.5)
    refused(
        model,
        torch.randn(2, WIDTH),
        RuntimeError,
        r"a parameter \(4, 4\) of layer 0.linear \(Linear\) has a hook and is also used outside",
    )


class Within(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * self.scale


def test_a_tensor_from_within_a_layer_that_is_used_outside_of_it_is_refused():
    """Its gradient would not come through to the layers before."""
    model, kept = nn.Sequential(nn.Linear(WIDTH, WIDTH), Within()), []
    splittable([model])
    model[1].linear.register_forward_hook(lambda module, args, output: kept.append(output))
    x = torch.randn(2, WIDTH)
    with pytest.raises(RuntimeError, match=r"made inside layer 0.1 \(Within\) was used outside"):
        (model(x).sum() + kept[0].square().sum()).backward()


def test_a_tensor_from_outside_that_is_neither_argument_nor_parameter_is_refused():
    class Reads(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.weight, self.others = nn.Parameter(torch.ones(WIDTH)), [other]

        def forward(self, x):
            return x * self.weight * self.others[0]

    other = nn.Parameter(torch.ones(WIDTH))
    (model,) = splittable([Reads(other)])
    refused(
        model,
        torch.randn(2, WIDTH),
        ValueError,
        r"layer 0 \(Reads\) uses a tensor of shape \(4,\) that requires a gradient and is "
        "neither an argument nor a parameter of this layer",
    )


def test_a_result_that_may_hide_a_tensor_is_refused_by_name():
    class Odd(Within):
        def forward(self, x):
            return super().forward(x), {x}

    (model,) = splittable([nn.Sequential(Odd())])
    with pytest.raises(TypeError, match=r"layer 0.0 \(Odd\) returned set, not a tensor or tensors"):
        model(torch.randn(2, WIDTH))


def test_a_group_norm_with_which_torch_would_crash_is_refused():
    """Here nobody runs a backward, which would end this process."""
    (layer,), x = splittable([nn.GroupNorm(1, 3)]), torch.randn(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"GroupNorm.* in channels_last that needs no gradient"):
        layer(x.to(memory_format=torch.channels_last))
    split_backward_of(layer(x).square().sum(), layer)
    assert layer.weight.grad.any()


def test_the_layer_after_a_linear_one_may_change_its_output_in_place():
    """Of three dimensions with a bias, whose product is a view of torch's matrix product."""
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    split = nn.Sequential(*splittable(copy.deepcopy([*plain])))
    x = torch.randn(2, 3, 4)
    plain(x).sum().backward()
    split(x).sum().backward()
    assert_equal_gradients(split, plain)
