"""What a layer changes in place, and what changes between a forward and its backward."""

import copy
import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from naranhi.autograd import Recompute, SavedTensors, Splittable, recompute, splittable
from naranhi.models import TransformerLayer

WIDTH = 3
CHANGES = "changes in place what needs a gradient: tensor 0 of its inputs, of shape"
NODE = "changes in place an argument or a weight that needs a gradient"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        self.own = nn.Parameter(torch.ones(WIDTH))

    def forward(self, *inputs):
        return self.function(self, *inputs)


def normalized(layer, x):
    return layer.linear(x.sub_(2).div_(3))


def rectified(layer, x):
    return layer.linear(x.relu_())


def inverted(layer, x, mask):
    return layer.linear(x).masked_fill(mask.logical_not_(), 0.0)


def passed_on(layer, x, mask):
    return layer.linear(x) * mask.mul_(2), mask


def added(layer, x):
    return x.add_(layer.own)


def put(layer, x):
    x[:, 0] = layer.own
    return x


# --- recomputation -------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [normalized, rectified, inverted, passed_on])
def test_a_recomputed_layer_may_change_inputs_without_a_gradient(function):
    """Both calls, and a third, find what was there; the caller sees one change, as without."""
    found = []
    layer = Layer(function)
    for way in (lambda layer: layer, Recompute):
        layer.zero_grad()
        inputs = [torch.linspace(-1, 8, 4 * WIDTH).view(4, WIDTH)]
        if function is inverted:
            inputs.append(torch.tensor([[True, False, True]]))
        if function is passed_on:
            inputs.append(torch.tensor([1.0, 2.0, 3.0]))
        result = way(layer)(*inputs)
        result = result[0] if isinstance(result, tuple) else result
        for kept in (True, False):
            result.square().sum().backward(retain_graph=kept)
        found.append([result, *inputs, *(param.grad for param in layer.linear.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("function", [added, put])
def test_a_recomputed_layer_that_gives_its_input_a_gradient_is_refused(function):
    """It had none, silently."""
    model = nn.Sequential(Recompute(Layer(function)), nn.Linear(WIDTH, 1))
    loss = model(torch.zeros(2, 4, WIDTH)).sum()
    with pytest.raises(RuntimeError, match=rf"Layer {CHANGES} \(2, 4, 3\).* a clone\(\) of it"):
        loss.backward()


@pytest.mark.parametrize("function", [normalized, rectified, added, put])
def test_a_recomputed_layer_that_changes_an_input_with_a_gradient_is_refused(function):
    x = torch.zeros(2, 4, WIDTH, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match=rf"Layer {CHANGES} \(2, 4, 3\)"):
        Recompute(Layer(function))(x)


class Gated(nn.Module):
    """Both a buffer that no forward changes, and one that may grow, as a table of positions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(float(len(x)))[:, None] / len(x)
        return torch.tanh(x * self.weight * self.scale + self.table[: len(x)])


def test_a_buffer_that_changes_before_the_backward_is_noticed():
    """Otherwise the recomputation would silently be that of another network."""
    layer = Gated()
    result = Recompute(layer)(torch.ones(2, WIDTH))
    layer.scale.add_(1)
    with pytest.raises(RuntimeError, match=r"the buffer scale, of shape \(\), has been changed in"):
        result.sum().backward()


def test_a_buffer_that_a_later_forward_replaces_is_that_of_the_forward():
    found = []
    for way in (lambda layer: layer, Recompute):
        layer = way(Gated())
        with torch.no_grad():
            layer(torch.ones(2, WIDTH))
        results = [layer(torch.ones(rows, WIDTH)) for rows in (2, 2, 5)]
        for result in results:
            result.sum().backward()
        found.append(layer.weight.grad)
    assert torch.equal(*found)


def test_a_buffer_made_in_inference_mode():
    found = []
    for way in (lambda layer: layer, Recompute):
        layer = way(Gated())
        with torch.inference_mode():
            layer(torch.ones(4, WIDTH))
        assert layer.table.is_inference()
        layer(torch.ones(3, WIDTH)).sum().backward()
        found.append(layer.weight.grad)
    assert torch.equal(*found)


def drops():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())


def whole(recompute):
    return lambda: TransformerLayer(8, 2, dropout=0.5, recompute=recompute)


@pytest.mark.parametrize(
    "make, make_other",
    [(drops, lambda: Recompute(drops())), (whole("none"), whole("full"))],
)
def test_evaluation_before_the_backward_changes_no_gradient(make, make_other):
    found = []
    for one in (make, make_other):
        torch.manual_seed(0)
        layer = one()
        result = layer(torch.ones(4, 2, 8))
        layer.eval()
        result.sum().backward()
        assert not any(module.training for module in layer.modules())
        found.append([param.grad for param in layer.parameters()])
    assert all(map(torch.equal, *found))


def test_a_layer_may_have_keywords_of_the_names_that_recompute_has():
    class Named(nn.Linear):
        def forward(self, x, function, parameters):
            return super().forward(x) * function * parameters

    layer, x = Named(WIDTH, WIDTH), torch.ones(2, WIDTH)
    twice = torch.full((WIDTH,), 2.0)
    expected = layer(x, function=twice, parameters=3)
    assert torch.equal(Recompute(layer)(x, function=twice, parameters=3), expected)
    assert torch.equal(recompute(lambda function: function * 3, function=x), x * 3)


# --- a split backward ----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [added, put])
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_a_split_layer_that_gives_its_argument_a_gradient_is_refused(function, wants_gradient):
    (model,) = splittable([nn.Sequential(Layer(function))])
    x = torch.zeros(2, 4, WIDTH, requires_grad=wants_gradient) * 1
    with pytest.raises(RuntimeError, match=rf"layer 0.0 \(Layer\) {NODE}.* a clone\(\) of it"):
        model(x)


def test_a_split_layer_may_change_arguments_without_a_gradient():
    plain = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    split, x = Splittable(copy.deepcopy(plain)), torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    for model in (plain, split):
        model(x.clone()).square().sum().backward()
    assert torch.equal(split.layer[1].weight.grad, plain[1].weight.grad)
    with pytest.raises(RuntimeError, match=f"Sequential {NODE}"):
        split(x.requires_grad_() * 1)


# --- containers among the arguments --------------------------------------------------------------


@dataclass
class Notes:
    value: torch.Tensor
    calls: int = 0


class Noting(nn.Module):
    """A layer that leaves a penalty in containers of its caller."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x, penalties, cache, notes):
        y = torch.tanh(x @ self.weight)
        penalties.append(y.square().mean())
        cache["last"] = {"input": x, "output": y}
        cache["calls"] = cache.get("calls", 0) + 1
        notes.value, notes.calls = y.sum(), notes.calls + 1
        return y


def noted(wrap):
    torch.manual_seed(0)
    layers = [wrap(Noting()) for _ in range(3)]
    x = value = torch.ones(2, WIDTH, requires_grad=True)
    penalties, cache, notes = [], {}, Notes(torch.zeros(()))
    for layer in layers:
        value = layer(value, penalties, cache, notes=notes)
    last = cache["last"]
    (value.sum() + sum(penalties) + last["input"].exp().mean() + notes.value**2).backward()
    grads = [parameter.grad for layer in layers for parameter in layer.parameters()]
    return (len(penalties), cache["calls"], notes.calls), [last["output"].detach(), x.grad, *grads]


@pytest.mark.parametrize("wrap", [Recompute, Splittable, lambda layer: splittable([layer])[0]])
def test_what_a_layer_puts_into_an_argument_reaches_the_caller_with_its_gradient(wrap):
    plain, expected = noted(lambda layer: layer)
    counts, found = noted(wrap)
    assert counts == plain == (3, 3, 3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_what_is_put_into_an_argument_is_freed_without_a_collection():
    """The outputs would hold the call, and the call, by its arguments, the outputs."""
    x = torch.ones(2, WIDTH, requires_grad=True)

    def function(x, outer):
        outer.append(x * 2)
        return x * 3

    gc.collect()
    gc.disable()
    try:
        outer = []
        result = recompute(function, x, outer)
        freed = weakref.ref(outer[0])
        del outer, result
        assert freed() is None
    finally:
        gc.enable()


def test_what_is_in_an_argument_stays_the_object_that_it_is():
    x, y = torch.ones(2, WIDTH, requires_grad=True), torch.zeros(1)
    inner = [y]
    outer = [x, inner]

    def function(outer):
        outer[1].append(outer[0])
        outer.append(outer[0] * 2)
        return outer[0] * 3

    result = recompute(function, outer)
    assert outer[0] is x and outer[1] is inner and inner[0] is y and inner[1] is x
    (result.sum() + outer[2].sum()).backward()
    assert x.grad.eq(5).all()


# --- counting ------------------------------------------------------------------------------------


def test_counting_leaves_changes_in_place_noticed():
    """Autograd does not look at versions of what hooks save."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with SavedTensors([]):
        y = x.sigmoid()
    y.mul_(2)
    with pytest.raises(RuntimeError, match=r"\(2,\) that the backward needs has been modified by"):
        y.sum().backward()


def test_counting_leaves_changed_weights_noticed():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH, requires_grad=True)
    with SavedTensors(layer):
        loss = layer(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
