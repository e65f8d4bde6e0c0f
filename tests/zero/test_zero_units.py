"""Units of several modules, on two ranks beside one process: whatever the modules do, a unit is
summed when all its gradients have come, and its parameters are there as long as they are needed."""

import copy
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from naranhi.collectives import chunks
from naranhi.zero import Zero, children, joined
from naranhi.zero.flat_param import FlatParam
from naranhi.zero.units import SMALL

STAGES = 1, 2, 3


def linear():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Model(nn.Module):
    """Four layers, of which the last three can be one unit."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.c = (linear() for _ in range(4))


class Odd(nn.Linear):
    """Returns an object, and a choice that has no gradient; keeps a part of the loss to itself."""

    def forward(self, x):
        y = super().forward(x)
        self.kept = y.square().sum()
        return SimpleNamespace(choice=y.argmax(-1), y=y)


class Returns(Model):
    """What comes out of a module in the midst of a unit cannot be seen from outside."""

    def __init__(self):
        super().__init__()
        self.b = Odd(4, 4)

    def forward(self, x):
        y = self.a(self.first(x))
        odd = self.b(y)
        return self.c(y * (1 + odd.choice[:, None])).square().sum() + odd.y.sum() + self.b.kept


class OutOfOrder(Model):
    """Out of order, twice, without a graph; and one that is in two places."""

    def __init__(self):
        super().__init__()
        self.several = nn.ModuleList([self.b, linear()])

    def forward(self, x):
        y = self.c(self.first(x))
        y = self.b(self.a(y)) + self.a(y)
        with torch.no_grad():
            factor = self.c(y)
        return (y * factor + self.first(x)).square().sum()


class Recomputed(Model):
    """By both ways of `checkpoint`, side by side or one in the other."""

    def __init__(self, *reentrant, within=False):
        super().__init__()
        self.reentrant, self.within = reentrant, within

    def forward(self, x):
        one, two = self.reentrant
        y = self.first(x)
        if self.within:
            return (
                checkpoint(
                    lambda y: self.b(checkpoint(self.a, y, use_reentrant=one)), y, use_reentrant=two
                )
                .square()
                .sum()
            )
        y = checkpoint(self.a, y, use_reentrant=one)
        return self.c(checkpoint(self.b, y, use_reentrant=two)).square().sum()


class Frozen(Model):
    """In a recomputed region a frozen layer, through which the gradient goes on."""

    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)

    def forward(self, x):
        y = checkpoint(lambda y: self.b(self.a(y)), self.first(x), use_reentrant=True)
        return self.c(y).square().sum()


MODELS = {
    "returns": Returns,
    "out of order": OutOfOrder,
    "frozen": Frozen,
    "reentrant, then not": lambda: Recomputed(True, False),
    "not reentrant, then so": lambda: Recomputed(False, True),
    "reentrant in one that is not": lambda: Recomputed(True, False, within=True),
}


def apart(kind, stage, several):
    """How far parameters are from those of one process, after three steps."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    one = copy.deepcopy(model)
    first, *rest = children(model)
    zero = Zero(model, stage, units=[first, tuple(rest)] if several else None, group=group)
    ours = torch.optim.SGD(zero.param_groups, lr=0.01)
    theirs = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.01)
    for step in range(3):
        xs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step)).double()
        theirs.zero_grad()
        for x in xs:
            one(x).backward()
        theirs.step()
        model(xs[rank]).backward()
        zero.step(ours)
    with zero.gathered():
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_all_kinds_train_as_in_one_process(five, kind, stage, several):
    if (kind, stage, several) == ("returns", 3, False):
        with pytest.raises(AssertionError, match="RuntimeError"):  # loudly, as the docstring says
            five.call(apart, kind, stage, several)
    else:
        assert five.call(apart, kind, stage, several)[0] <= 1e-12


def products(ctx, operation, *args, **kwargs):
    kept = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def all_but_tanh(ctx, operation, *args, **kwargs):
    recomputed = operation is torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_RECOMPUTE if recomputed else CheckpointPolicy.MUST_SAVE


def selectively(kept):
    return {"context_fn": partial(create_selective_checkpoint_contexts, kept)}


def recomputed_alone(stage, reentrant, regions, kept=None):
    """Blocks joined in two units, recomputed each by itself, in pairs, or in one region.

    kept: a policy of what a selective checkpoint keeps; None recomputes all.
    """
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers).double()
    run = copy.deepcopy(model)
    told, options = [], selectively(kept) if kept else {}
    zero = Zero(
        model,
        stage,
        units=[tuple(layers[:2]), tuple(layers[2:])],
        group=group,
        on_event=lambda event, what: told.append((event, what)),
    )
    ours = torch.optim.SGD(zero.param_groups, lr=0.1)
    theirs = torch.optim.SGD(run.parameters(), lr=0.1)

    def loss(blocks, x):
        for some in zip(*[iter(blocks)] * (len(layers) // regions), strict=True):
            x = checkpoint(nn.Sequential(*some), x, use_reentrant=reentrant, **options)
        return x.square().sum()

    # Zero listens to the whole model's forward: so the regions are the model's own.
    model.forward = lambda x: loss(layers, x)
    for step in range(3):
        xs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step)).double()
        xs.requires_grad_()
        theirs.zero_grad()
        for x in xs:
            loss(run, x).backward()
        theirs.step()
        del told[:]
        model(xs[rank]).backward()
        zero.step(ours)
    with zero.gathered():
        for a, b in zip(model.parameters(), run.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    return [one for one in told if one[0] in ("gather", "free", "reduce")]


@pytest.mark.parametrize("regions", [4, 2, 1])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_joined_units_are_recomputed_in_regions_of_any_size(five, stage, reentrant, regions):
    told = five.call(recomputed_alone, stage, reentrant, regions)[0]
    reduced = [what for event, what in told if event == "reduce"]
    assert reduced == ["2 to 3", "0 to 1"]
    if stage == 3 and regions > 1:  # in one region both are needed until its end
        last_free = max(i for i, event in enumerate(told) if event == ("free", "0 to 1"))
        assert told.index(("reduce", "2 to 3")) < last_free


@pytest.mark.parametrize("regions", [4, 2, 1])
@pytest.mark.parametrize("kept", [products, all_but_tanh])
@pytest.mark.parametrize("stage", STAGES)
def test_selective_checkpoints_neither_number_nor_keep_what_hooks_do(five, stage, kept, regions):
    five.call(recomputed_alone, stage, False, regions, kept)


def test_small_neighbours_are_joined():
    widths = [10, 20, SMALL, SMALL - 1, 5, 7, 2 * SMALL, 1]
    modules = [nn.Linear(width, 1, bias=False) for width in widths]
    assert [[one.in_features for one in run] for run in joined(modules)] == [
        [10, 20],
        [SMALL],
        [SMALL - 1, 5],
        [7],
        [2 * SMALL],
        [1],
    ]


def other_modules():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    unit = tuple(model) if rank else (model[0], model[2])
    try:
        Zero(model, 1, units=[unit], group=group)
    except ValueError as error:
        return str(error)


def test_ranks_that_join_other_modules_are_told(five):
    assert five.call(other_modules)[:2] == ["units: ['0, 2'] on rank 0, ['0, 1, 2'] on rank 1"] * 2


class Called(nn.Module):
    """A layer that reads an embedding, which it may share."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.layer = embedding, nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.embedding(x))


class Translates(nn.Module):
    """An embedding that encoder and decoder share, as T5's, or encoder and the model itself, and
    layers in a list."""

    def __init__(self, kind="both"):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Embedding(5, 4)
        self.encoder = Called(self.shared)
        self.decoder = Called(self.shared) if kind == "both" else nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        low = x.flip(0) if isinstance(self.decoder, Called) else self.shared(x.flip(0))
        x = self.encoder(x) + self.decoder(low)
        for layer in self.layers:
            x = layer(x)
        return x


def shared_and_named(stage, kind="both"):
    """Default units of a model with a shared child, groups of (name, parameter); a list as unit."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, one = Translates(kind), Translates(kind)
    other = Translates()
    try:
        Zero(other, stage, units=[other.layers], group=group)
    except ValueError as caught:
        bare = str(caught)
    zero = Zero(model, stage, param_groups=[{"params": model.named_parameters()}], group=group)
    ours = torch.optim.SGD(zero.param_groups, lr=0.1)
    theirs = torch.optim.SGD([{"params": one.named_parameters()}], lr=0.1)
    for _ in range(2):
        theirs.zero_grad()
        for place in 0, 1:
            one(torch.arange(4) + place).square().sum().backward()
        theirs.step()
        model(torch.arange(4) + rank).square().sum().backward()
        zero.step(ours)
    with zero.gathered():
        for param, expected in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(param, expected)
    return [unit.name for unit in zero.units], bare


@pytest.mark.parametrize("kind", ["both", "encoder and model"])
@pytest.mark.parametrize("stage", STAGES)
def test_shared_children_named_parameters_and_units_that_nothing_calls(five, stage, kind):
    for names, bare in five.call(shared_and_named, stage, kind)[:2]:
        assert names == ["encoder", "decoder", "layers.0", "layers.1", "root"]
        assert bare == "unit layers has no forward to be called: make its children units"


class Tied(nn.Module):
    """A head that is a unit, and has the weight of an embedding that is not."""

    def __init__(self):
        super().__init__()
        self.wte, self.block, self.head = nn.Embedding(5, 4), linear(), nn.Linear(4, 5, bias=False)
        self.head.weight = self.wte.weight
        self.units = [self.block, self.head]

    def forward(self, x):
        return self.head(self.block(self.wte(x)))


class Registers(nn.Module):
    """A weight of a unit that the model has too, and uses before the unit computes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own, self.units = self.b.weight, None

    def forward(self, x):
        return self.b(self.a(nn.functional.one_hot(x, 4).to(self.own.dtype)) @ self.own)


class Within(nn.Module):
    """A part of a unit that a module beside the units has too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()
        self.beside = nn.Sequential(self.b[0])
        self.units = [self.a, self.b]

    def forward(self, x):
        x = nn.functional.one_hot(x, 4).to(self.b[0].weight.dtype)
        return self.b(self.a(self.beside(x)))


SHARED = {
    Tied: {"block": ["0.weight", "0.bias"], "root": ["wte.weight"]},
    Registers: {"a": ["weight", "bias"], "b": ["bias"], "root": ["own"]},
    Within: {"a": ["0.weight", "0.bias"], "root": ["b.0.weight", "b.0.bias"]},
}


def shared_with_the_root(kind, stage):
    """The names of each unit's parameters, after steps beside one process."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    model = kind().double()
    units, model.units = model.units, None
    one = copy.deepcopy(model)
    zero = Zero(model, stage, units=units, group=group)
    ours = torch.optim.SGD(zero.param_groups, lr=0.1)
    theirs = torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(3):
        theirs.zero_grad()
        for place in 0, 1:
            one(torch.arange(3) + place).square().sum().backward()
        theirs.step()
        model(torch.arange(3) + rank).square().sum().backward()
        zero.step(ours)
    with zero.gathered():
        for param, expected in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(param, expected, rtol=0, atol=1e-12)
    return {
        unit.name: [
            name.removeprefix(f"{unit.name}.") for flat in unit.flats for name in flat.names
        ]
        for unit in zero.units
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", SHARED)
def test_what_a_unit_shares_with_a_module_outside_belongs_to_the_root(five, kind, stage):
    assert five.call(shared_with_the_root, kind, stage)[:2] == [SHARED[kind]] * 2


class Positions(nn.Module):
    """A table of positions, of which it returns the first ones, or a copy of them."""

    def __init__(self, returns):
        super().__init__()
        self.table, self.returns = nn.Parameter(torch.ones(8, 4)), returns

    def forward(self, number):
        rows = self.table[:number]
        return {"view": rows, "itself": self.table, "clone": rows.clone()}[self.returns]


class Positioned(nn.Module):
    def __init__(self, returns):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.positions, self.last = linear(), Positions(returns), linear()

    def forward(self, x):
        return self.last(self.first(x) + self.positions(len(x))[: len(x)])


def positioned(stage, returns, within):
    """The error of a forward; without one, the model has been trained on."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = Positioned(returns)
    units = [model.first, model.last] if within == "root" else None
    zero = Zero(model, stage, units=units, group=group)
    error = None
    for recording in False, True:
        try:
            with torch.set_grad_enabled(recording):
                model(torch.ones(3, 4))
        except RuntimeError as caught:
            error = str(caught)
            zero.zero_grad()
    model.positions.returns = "clone"
    model(torch.ones(3, 4)).sum().backward()
    zero.step(torch.optim.SGD(zero.param_groups, lr=0.1))
    return error


@pytest.mark.parametrize("returns", ["view", "itself", "clone"])
@pytest.mark.parametrize("within", ["unit", "root"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_unit_that_returns_its_parameter_is_refused_at_stage_3(five, stage, returns, within):
    refused = stage == 3 and returns != "clone" and within == "unit"
    for error in five.call(positioned, stage, returns, within)[:2]:
        assert error == (
            "unit positions returns its parameter, or a view of it, whose memory stage 3 frees "
            "when the unit is done: return a clone(), or leave that module to the root"
            if refused
            else None
        )


def gathered_in_another_order():
    """Two flat parameters of one length, which rank 1 gathers in the other order."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    params = [nn.Parameter(torch.full((16,), float(value))) for value in (1, 2)]
    flats = [
        FlatParam([("x", param)], {param: 0}, 3, torch.float32, [group], tag)
        for tag, param in enumerate(params, 1)
    ]
    chunks.overlap(flat.all_gather() for flat in (flats if rank == 0 else reversed(flats)))
    return [flat.whole.tolist() for flat in flats]


def test_gathers_in_different_orders_do_not_mistake_one_another(five):
    assert five.call(gathered_in_another_order)[:2] == [[[1.0] * 16, [2.0] * 16]] * 2


class HeadFirst(nn.Module):
    """Its head is registered before the layers that run before it."""

    def __init__(self):
        super().__init__()
        self.head, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.head(self.second(self.first(x)))


def orders(stage):
    """On a rank: the order of the reductions of each step."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, told = HeadFirst(), []
    zero = Zero(model, stage, group=group, on_event=lambda *event: told.append(event))
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    found = []
    for _ in range(3):
        del told[:]
        model(torch.ones(2, 4)).sum().backward()
        zero.step(optimizer)
        found.append([what for event, what in told if event == "reduce"])
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reductions_follow_the_backward_from_the_second_step_on(five, stage):
    """The head's backward ends first. Registered first, it would be the last to be reduced."""
    answers = five.call(orders, stage)[:2]
    assert answers[0] == answers[1]
    assert answers[0][1:] == 2 * [["head", "second", "first"]]


class Branches(nn.Module):
    """Two branches, which rank 1 computes in the other order."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        left_first = dist.get_rank() == 0
        y = self.left(x) if left_first else self.right(x)
        return y + (self.right(x) if left_first else self.left(x)) ** 2


def branches(stage):
    """On a rank: the order of each step's reductions, and the summed gradients of the last."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    model, told = Branches(), []
    zero = Zero(model, stage, group=group, on_event=lambda *event: told.append(event))
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.0)
    found = []
    for _ in range(3):
        del told[:]
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        norm = zero.clip_grad_norm_(1e9)
        zero.step(optimizer)
        found.append(([what for event, what in told if event == "reduce"], norm))
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_rank_0_says_in_which_order_all_ranks_reduce(five, stage):
    """In orders of their own, they would add up gradients of different units."""
    one, other = five.call(branches, stage)[:2]
    assert one == other
    assert one[0][0] == one[1][0] == one[2][0] == ["right", "left"]
    assert one[0][1] == one[1][1] == one[2][1]


def frozen_for_a_while(stage, precision):
    """On a rank: whether a unit, frozen between two steps, stays as it is, and goes on later."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = HeadFirst()
    zero = Zero(model, stage, group=group, precision=precision)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    moved = []
    for trained in True, False, True:
        model.first.requires_grad_(trained)
        with zero.gathered():
            before = model.first.weight.detach().clone(), model.second.weight.detach().clone()
        model(torch.ones(2, 4)).sum().backward()
        zero.step(optimizer)
        with zero.gathered():
            after = model.first.weight, model.second.weight
            moved.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
    return moved


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_unit_that_is_frozen_between_steps_can_be_gathered(five, stage, precision):
    answers = five.call(frozen_for_a_while, stage, precision)[:2]
    assert answers == 2 * [[[True, True], [False, True], [True, True]]]


class Wrapped(nn.Module):
    """As models of transformers are: one child has all the blocks."""

    def __init__(self, blocks):
        super().__init__()
        self.body, self.head = nn.Sequential(*(nn.Linear(8, 8) for _ in range(blocks))), linear()

    def forward(self, x):
        return self.head(self.body(x)[:, :4])


def warnings_of(stage, blocks, given):
    """On a rank: what is said of the units of a model."""
    model = Wrapped(blocks)
    units = [model.body, model.head] if given else None  # the same ones
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero = Zero(model, stage, units=units)
    zero.close()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("stage", "blocks", "given", "warns"),
    [(3, 5, False, True), (3, 5, True, False), (2, 5, False, False), (3, 1, False, False)],
)
def test_a_unit_that_has_most_of_a_model_is_warned_of(five, stage, blocks, given, warns):
    first, *others = five.call(warnings_of, stage, blocks, given)
    assert not any(others), "once"
    assert len(first) == warns
    for words in first:
        assert words.startswith("stage 3 gathers body as one unit, which has 94% of the parameters")
