"""Hooks, subclasses and parametrizations: what plain torch makes of them, a backward in two parts
and recomputation make of them too; or it is refused by name."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from naranhi.autograd import Recompute, Splittable, splittable

WIDTH, MICROBATCHES = 4, 3
ORDER = ["F0", "F1", "I0", "F2", "I1", "W0", "I2", "W1", "W2"]


# --- what is tried: each makes a model, and may note what its hooks see ---------------------------


def noting(notes, what, change=None):
    """A hook that notes its arguments, and returns what `change` makes of the last of them."""

    def hook(*args):
        notes.append((what, _detached([one for one in args if not isinstance(one, nn.Module)])))
        return change(args[-1]) if change else None

    return hook


def _detached(value):
    if isinstance(value, tuple | list):
        return list(map(_detached, value))
    if isinstance(value, dict):
        return {name: _detached(one) for name, one in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def linear(notes):
    return nn.Linear(WIDTH, WIDTH)


def hooked(register, change=None, make=linear, **options):
    """A model whose layer has a hook of that kind."""

    def case(notes):
        layer = make(notes)
        hook = noting(notes, register, change)
        getattr(layer, register)(hook, **options)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    return case


def parameter_hooks(notes):
    layer = linear(notes)
    layer.weight.register_hook(noting(notes, "weight", lambda g: g * 0.5))
    layer.weight.register_hook(noting(notes, "weight again", lambda g: g.clamp(-0.1, 0.1)))
    layer.bias.register_hook(noting(notes, "bias"))
    layer.weight.register_post_accumulate_grad_hook(
        lambda weight: noting(notes, "sum")(weight.grad.mul_(0.5))
    )
    layer.bias.register_post_accumulate_grad_hook(
        lambda bias: noting(notes, "sum of the bias")(bias.grad)
    )
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer)


def norm_with_parameter_hooks(notes):
    norm = nn.LayerNorm(WIDTH)
    for name, one in norm.named_parameters():
        one.register_hook(noting(notes, name, lambda g: g * 0.5))
        one.register_post_accumulate_grad_hook(
            lambda one, name=name: noting(notes, f"sum of {name}")(one.grad)
        )
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)


class Twice(nn.Module):
    """One layer, used twice, whose hook sees the sum of both uses."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.same = layer, layer

    def forward(self, x):
        return self.same(torch.tanh(self.layer(x)))


def used_twice(make):
    def case(notes):
        layer = make(notes)
        layer.weight.register_hook(noting(notes, "weight", lambda g: g.clamp(-0.1, 0.1)))
        layer.bias.register_post_accumulate_grad_hook(lambda one: noting(notes, "bias")(one.grad))
        return Twice(layer)

    return case


class Double(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Lora(nn.Linear):
    """A Linear that is frozen, beside a narrow pair that learns."""

    def __init__(self, width, rank=2):
        super().__init__(width, width)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.requires_grad_(False)
        self.down.requires_grad_(True)
        self.up.requires_grad_(True)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def changed(change):
    """A model whose layer has been given to that."""

    def case(notes):
        layer = linear(notes)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), change(layer) or layer, nn.Tanh())

    return case


class Within(nn.Module):
    """A module with a weight and another module, so that it is split as a whole."""

    def __init__(self, inner, use=None):
        super().__init__()
        self.scale, self.inner, self.use = nn.Parameter(torch.randn(WIDTH)), inner, use

    def forward(self, x):
        y = self.inner(x * self.scale)
        if self.use and y.requires_grad:
            y.register_hook(self.use)
        return y * self.scale


def hooked_within(register, change=None, **options):
    def case(notes):
        inner = linear(notes)
        getattr(inner, register)(noting(notes, register, change), **options)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Within(inner))

    return case


def hook_in_a_forward(notes):
    return Within(linear(notes), noting(notes, "tensor", lambda g: g * 0.5))


class Auxiliary(nn.Module):
    """A hook hands what a layer returns to the loss, past the layers in between."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.seen = linear(None), linear(None), None
        self.first.register_forward_hook(self.see)

    def see(self, module, args, output):
        self.seen = output

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) + self.seen.square()


class Shared(nn.Module):
    """One weight for three uses, one of them past its layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(None), linear(None)
        self.second.weight = self.first.weight

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.second(self.first(x))), self.first.weight)


@dataclass
class Pair:
    x: torch.Tensor
    factor: float


class Nested(nn.Module):
    """Arguments and results in every kind of nest; what is one tensor stays one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, several, pair, *, named, same, flag=False):
        assert several[1] is same and flag and named["nothing"] is None
        y = several[0] * self.weight + pair.x * pair.factor + named["x"] * self.weight
        return {"y": [y, None, (same * self.weight, 3)]}


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.nested = linear(None), Nested()

    def forward(self, x):
        x = self.first(x)
        found = self.nested(
            [x, x], Pair(x * 2, 3.0), named={"x": x.tanh(), "nothing": None}, same=x, flag=True
        )["y"]
        assert found[1] is None and found[2][1] == 3
        return found[0] + found[2][0]


class Attention(nn.Module):
    """As a Transformer's block calls it, with keyword arguments."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


def transformer_layer(notes):
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)


def compiled(notes):
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    layer[0].compile(backend="aot_eager")
    return nn.Sequential(torch.compile(layer, backend="aot_eager"), nn.Linear(WIDTH, WIDTH))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(WIDTH)), linear(None)

    def forward(self, x):
        return checkpoint(self.inner, x * self.scale, use_reentrant=False) * self.scale


CASES = {
    "forward hook": hooked("register_forward_hook", lambda y: y * 2),
    "forward hook, kwargs, always": hooked(
        "register_forward_hook", lambda y: y * 2, with_kwargs=True, always_call=True
    ),
    "forward pre-hook": hooked("register_forward_pre_hook", lambda args: (args[0] * 2,)),
    "forward pre-hook, kwargs": hooked("register_forward_pre_hook", with_kwargs=True),
    "full backward hook": hooked("register_full_backward_hook", lambda grads: None),
    "full backward hook of a norm": hooked(
        "register_full_backward_hook", None, lambda notes: nn.LayerNorm(WIDTH)
    ),
    "full backward pre-hook": hooked(
        "register_full_backward_pre_hook", lambda grads: (grads[0] * 2,)
    ),
    "hooks of a linear's parameters": parameter_hooks,
    "hooks of a norm's parameters": norm_with_parameter_hooks,
    "a linear used twice": used_twice(linear),
    "a norm used twice": used_twice(lambda notes: nn.LayerNorm(WIDTH)),
    "a frozen norm used twice": lambda notes: nn.Sequential(
        linear(notes), Twice(nn.LayerNorm(WIDTH).requires_grad_(False))
    ),
    "old spectral norm": changed(spectral_norm),
    "spectral norm": changed(parametrizations.spectral_norm),
    "old weight norm": changed(weight_norm),
    "weight norm": changed(parametrizations.weight_norm),
    "orthogonal": changed(parametrizations.orthogonal),
    "parametrized": changed(
        lambda one: parametrize.register_parametrization(one, "weight", Symmetric())
    ),
    "pruned": changed(lambda one: prune.l1_unstructured(one, "weight", 0.5)),
    "pruned bias": changed(lambda one: prune.l1_unstructured(one, "bias", 0.5)),
    "subclass": changed(lambda one: Double(WIDTH, WIDTH)),
    "lora": changed(lambda one: Lora(WIDTH)),
    "forward set on the object": changed(
        lambda one: setattr(one, "forward", lambda x, own=one.forward: own(x) * 2)
    ),
    "forward hook within": hooked_within("register_forward_hook", lambda y: y * 2),
    "backward hook within": hooked_within(
        "register_full_backward_hook", lambda grads: (grads[0].float() * 2,)
    ),
    "backward pre-hook within": hooked_within(
        "register_full_backward_pre_hook", lambda grads: (grads[0] * 2,)
    ),
    "old backward hook within": hooked_within("register_backward_hook"),
    "hook on a tensor of the forward": hook_in_a_forward,
    "hook that keeps the output": lambda notes: Auxiliary(),
    "shared weight": lambda notes: Shared(),
    "nested arguments": lambda notes: Caller(),
    "attention": lambda notes: Attention(),
    "transformer layer": transformer_layer,
    "compiled": compiled,
    "checkpointed": lambda notes: nn.Sequential(linear(notes), Checkpointed()),
    "frozen": lambda notes: nn.Sequential(linear(notes).requires_grad_(False), linear(notes)),
}


def microbatch(k, grad=True):
    generator = torch.Generator().manual_seed(k)
    return torch.randn(2, 3, WIDTH, generator=generator).requires_grad_(grad)


def loss_of(y):
    return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() + y.square().sum()


def trained(case, prepare, order, grad=True, autocast=False):
    """Losses, gradients of inputs and of parameters, and notes, of micro-batches in an order."""
    torch.manual_seed(0)
    notes = []
    model = prepare(CASES[case](notes))
    xs = [microbatch(k, grad) for k in range(MICROBATCHES)]
    losses, later = [None] * MICROBATCHES, [[] for _ in xs]
    parts = [one for one in model.modules() if isinstance(one, Splittable)]
    for what, k in ((action[0], int(action[1])) for action in order):
        if what == "F":
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses[k] = loss_of(model(xs[k]).float())
        elif what == "W":
            for add in later[k]:
                add()
        else:
            for one in parts:
                one.defer = later[k].append if what == "I" else None
            losses[k].backward()
            for one in parts:
                one.defer = None
    gradients = [one.grad for one in model.parameters()]
    return [one.detach() for one in losses], [x.grad for x in xs], gradients, notes


def by_kind(trained):
    """Its notes, each kind's in their order: so often was such a hook called."""
    losses, inputs, gradients, notes = trained
    kinds = {kind: [value for what, value in notes if what == kind] for kind, _ in notes}
    return {"losses": losses, "inputs": inputs, "gradients": gradients, **kinds}


def assert_same(found, expected, atol=0.0):
    torch.testing.assert_close(by_kind(found), by_kind(expected), rtol=0, atol=atol)


# Where a layer has several uses, gradients are added up in another order, or one in bfloat16.
ROUNDING = {
    "a linear used twice": (0, 0.05),
    "a norm used twice": (0, 0.05),
    "shared weight": (1e-6, 0.05),
}
WHOLE = ["F0", "B0", "F1", "B1", "F2", "B2"]


def one_splittable(model):
    return splittable([model])[0]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_backward_in_two_parts_is_the_plain_one(case, grad, autocast):
    plain = trained(case, lambda model: model, WHOLE, grad, autocast)
    for order in (WHOLE, ORDER):
        found = trained(case, one_splittable, order, grad, autocast)
        assert_same(found, plain, ROUNDING.get(case, (0, 0))[autocast])


# --- recomputation -------------------------------------------------------------------------------


class Checkpoint(nn.Module):
    """Torch's own recomputation."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_recomputation_gives_the_plain_gradients(case, grad, autocast):
    """And calls hooks as often as torch's own does, on the same."""
    plain = trained(case, lambda model: model, WHOLE, grad, autocast)
    found = trained(case, Recompute, WHOLE, grad, autocast)
    assert_same((*found[:3], []), (*plain[:3], []))
    torchs = trained(case, Checkpoint, WHOLE, grad, autocast)
    if "spectral norm" not in case:  # whose power iteration torch's goes on with
        assert_same(torchs, (*plain[:3], torchs[3]))
    assert_same(([], [], [], found[3]), ([], [], [], torchs[3]))
