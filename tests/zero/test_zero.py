"""ZeRO on real ranks, against one process that accumulates the ranks' shares."""

import copy
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from one_process import (
    MAKE,
    OPTIMIZERS,
    STEPS,
    alone,
    largest_differences,
    same_bits_everywhere,
    share,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from naranhi.autograd import Recompute
from naranhi.data_parallel import global_count
from naranhi.zero import Zero, children, joined

STAGES = 1, 2, 3
CLIP = 0.05  # below the norms met here


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError, TypeError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def train(zero, model, loss, optimizer, work, steps, rank, clip=None):
    """Steps of ZeRO on a rank; the summed losses of its shares."""
    losses = []
    for step in steps:
        inputs, targets, valid = share(work, step, rank)
        count = global_count(valid, zero.group)
        total = loss(model(inputs), targets)
        (total / count).backward()
        if clip:
            norm = zero.clip_grad_norm_(clip)
            assert norm > clip
        zero.step(optimizer)
        losses.append(total.item() / count)
    return losses


# --- the same result -----------------------------------------------------------------------------


def training(ranks, work, optimizer, clip):
    """On rank 0, by stage: how far parameters are from those of one process after `STEPS` steps."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    expected, apart = alone(ranks, work, optimizer, clip) if rank == 0 else None, {}
    for stage in [*STAGES, "3, small units joined"]:
        torch.manual_seed(rank)  # another start on each rank, until they are made equal
        model, loss = MAKE[work]()
        if stage in STAGES:
            zero = Zero(model, stage, group=group)
        elif ranks == 2:
            zero = Zero(model, 3, units=joined(children(model)), group=group)
        else:
            continue
        stepper = OPTIMIZERS[optimizer](zero.param_groups)
        train(zero, model, loss, stepper, work, range(STEPS), rank, clip)
        with zero.gathered():
            assert same_bits_everywhere(model, group), stage
            if rank == 0:
                apart[stage] = largest_differences(model, expected)
    return apart


@pytest.mark.parametrize("work", MAKE)
@pytest.mark.parametrize(
    "ranks, optimizer, clip",
    [
        (1, "adamw 0.001", None),
        *product([2, 3, 4], OPTIMIZERS, [None]),
        *product([2], OPTIMIZERS, [CLIP]),
    ],
)
def test_training_equals_one_process(five, ranks, optimizer, work, clip):
    """To the bit on 1 and 2 ranks; sums of 3 or 4, and norms, are taken in another order."""
    apart = five.call(training, ranks, work, optimizer, clip)[0]
    assert len(apart) == 3 + (ranks == 2)
    kind, *rate = optimizer.split()
    for real, idle in apart.values():
        if ranks <= 2 and not clip:
            assert real == idle == 0.0
        else:
            assert real <= (1e-5 if rate == ["0.001"] else 1e-6)
            assert idle <= (2 * STEPS * float(rate[0]) if kind == "adamw" else 1e-6)


def accumulation(stage):
    """Three micro-batches on each of two ranks, two steps: to the bit, in the stage's order."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    torch.manual_seed(0)
    one, loss = MAKE["mlp"]()
    model = copy.deepcopy(one)
    zero = Zero(model, stage, group=group)
    steppers = [torch.optim.SGD(params, lr=0.1) for params in (one.parameters(), zero.param_groups)]
    for step in range(2):
        shares = [[share("mlp", 3 * step + k, r) for k in range(3)] for r in range(2)]
        # Stage 1 sums once, what each rank has accumulated; the others sum each micro-batch.
        orders = shares if stage == 1 else list(zip(*shares, strict=True))
        sums = []
        for order in orders:
            one.zero_grad()
            for inputs, targets, _ in order:
                (loss(one(inputs), targets) / 100).backward()
            sums.append([parameter.grad for parameter in one.parameters()])
        for parameter, *parts in zip(one.parameters(), *sums, strict=True):
            parameter.grad = parts[0]
            for part in parts[1:]:
                parameter.grad = parameter.grad + part
        steppers[0].step()

        with zero.no_sync():
            for inputs, targets, _ in shares[rank][:-1]:
                (loss(model(inputs), targets) / 100).backward()
        inputs, targets, _ = shares[rank][-1]
        (loss(model(inputs), targets) / 100).backward()
        zero.step(steppers[1])
    with zero.gathered():
        for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_accumulate_over_micro_batches(five, stage):
    five.call(accumulation, stage)


class Strange(nn.Module):
    """What models do: a unit used twice, one skipped, one frozen, one recomputed, one that takes
    two tensors, a norm with buffers, a parameter of the model's own."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.skipped = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.frozen[0].requires_grad_(False)
        self.again = Recompute(nn.Sequential(nn.Linear(5, 5), nn.Tanh()))
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.two, self.norm = nn.Bilinear(5, 5, 5), nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.ones(5))
        self.several = nn.ModuleList([nn.Linear(5, 5, bias=False) for _ in range(2)])
        self.within = Recompute(self.inner)  # a unit inside of what is recomputed

    def forward(self, x, skip=True):
        y = self.twice(torch.relu(self.twice(self.first(self.norm(x)))))
        if not skip:
            y = y + self.skipped(x)
        y = self.within(self.again(self.frozen(y)))
        y = self.two(y, x) * self.scale
        for layer in self.several:
            y = layer(y) + y
        return {"out": y}


def strange(stage, ranks, how):
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return
    torch.manual_seed(0)
    model = Strange()
    one = copy.deepcopy(model)
    units = [
        child
        for name, child in model.named_children()
        if name not in ("several", "within", "skipped")
    ]
    # What gets no gradient at times is a unit by itself, or it would decay with its neighbours.
    zero = Zero(
        model,
        stage,
        units=[model.skipped, *how([*units, *model.several])],
        group=group,
        param_groups=[
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
    )
    options = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}
    ours = torch.optim.SGD(zero.param_groups, **options)
    theirs = torch.optim.SGD(
        [
            {"params": [p for p in one.parameters() if p.dim() > 1]},
            {"params": [p for p in one.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        **options,
    )
    for step, skip in enumerate([True, False, True, True]):
        xs = torch.randn(ranks, 4, 5, generator=torch.Generator().manual_seed(step))
        theirs.zero_grad()
        for x in xs:
            one(x, skip)["out"].square().sum().backward()
        theirs.step()
        with torch.no_grad():
            model.eval()
            model(xs[rank], skip)
            model.train()
        model(xs[rank], skip)["out"].square().sum().backward()
        zero.step(ours)
    with zero.gathered():
        for (name, a), b in zip(model.named_parameters(), one.named_parameters(), strict=True):
            torch.testing.assert_close(a, b[1], rtol=0, atol=1e-5, msg=name)
    zero.close()
    model(xs[rank], True)["out"].sum().backward()  # an ordinary model again
    assert model.scale.grad.shape == (5,)


@pytest.mark.parametrize("how", [list, joined])
@pytest.mark.parametrize("stage, ranks", list(product(STAGES, [2, 3])))
def test_models_that_do_more_than_follow_one_another(five, stage, ranks, how):
    five.call(strange, stage, ranks, how)


@dataclass(frozen=True)
class Both:
    x: torch.Tensor
    others: tuple


class First(nn.Module):
    """Takes what needs no gradient, gives a dataclass, of which a part is changed in place."""

    def __init__(self):
        super().__init__()
        self.layer, self.scales = nn.Linear(4, 4), nn.ParameterList([torch.ones(4)])

    def forward(self, x):
        return Both(self.layer(x) * self.scales[0], (self.layer(2 * x), "a name"))


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, both):
        return {"out": self.layer(both.x) * both.others[0], "none": None}


class Shared(nn.Module):
    """A layer that is used in two recomputed regions, and once outside; parameters in a list."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.shared = First(), Second(), nn.Linear(4, 4)
        self.scales, self.reentrant = nn.ParameterList([torch.ones(4)]), reentrant

    def forward(self, x):
        both = self.first(x)
        both.x.mul_(2)
        y = self.second(both)["out"] * self.scales[0]
        for _ in range(2):
            y = y + checkpoint(lambda y: self.shared(y).tanh(), y, use_reentrant=self.reentrant)
        return self.shared(y)


def shared(stage, how):
    """Beside one process; a forward without a graph between forward and backward, and the forward
    before the block."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    for reentrant in True, False:
        torch.manual_seed(0)
        model = Shared(reentrant).double()
        one = copy.deepcopy(model)
        zero = Zero(model, stage, units=how(children(model)), group=group)
        ours = torch.optim.SGD(zero.param_groups, lr=1e-3)
        theirs = torch.optim.SGD(one.parameters(), lr=1e-3)
        for step in range(3):
            xs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step)).double()
            theirs.zero_grad()
            for x in xs:
                one(x).square().sum().backward()
            theirs.step()
            loss = model(xs[rank]).square().sum()
            with torch.no_grad():
                model(xs[rank])
            loss.backward()
            zero.step(ours)
        with zero.gathered():
            for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("how", [list, joined])
@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_of_several_recomputed_regions_and_dataclasses(five, stage, how):
    five.call(shared, stage, how)


class Kinds(nn.Module):
    """Parameters of four dtypes, each in the loss; the last has very large gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fp32, self.fp64 = nn.Linear(3, 5), nn.Linear(3, 5).double()
        self.complex64 = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.bf16 = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))

    def forward(self, x):
        return (
            self.fp32(x).sum()
            + self.fp64(x.double()).sum()
            + (self.complex64 * (1 + 2j)).sum().abs()
            + self.bf16.square().sum() * 1e10
        )


def norms(stage, norm_type):
    """The norm of each subset of the kinds, and of all: ours, and torch's in one process."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    found = []
    for kind in "fp32", "fp64", "complex64", "bf16", "":
        model, one = Kinds(), Kinds()
        for module in model, one:
            for name, param in module.named_parameters():
                param.requires_grad_(name.startswith(kind))
        zero = Zero(model, stage, group=group)
        model(torch.full((2, 3), 1.0 + rank)).backward()
        for value in 1.0, 2.0:
            one(torch.full((2, 3), value)).backward()
        grads = [param.grad for param in one.parameters() if param.grad is not None]
        expected = nn.utils.get_total_norm(
            [grad.to(torch.complex128) if grad.is_complex() else grad.double() for grad in grads],
            norm_type,
        )
        power = zero.norm_power(norm_type)
        parts = [torch.empty_like(power) for _ in range(2)]
        dist.all_gather(parts, power, group=group)
        total = max(parts) if norm_type == float("inf") else sum(parts) ** (1 / norm_type)
        limit = float(expected) / 4
        norm = zero.clip_grad_norm_(limit, norm_type)
        clipped = zero.clip_grad_norm_(1e30, norm_type)
        found.append((float(expected), norm, total.item(), clipped / limit))
    return found


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_of_gradients_of_any_dtype(five, stage, norm_type):
    for found in five.call(norms, stage, norm_type)[:2]:
        for expected, norm, total, clipped in found:
            assert norm == total == pytest.approx(expected, rel=1e-2 if expected > 1e6 else 1e-6)
            assert clipped == pytest.approx(1, rel=1e-2)


# --- mixed precision -----------------------------------------------------------------------------


def mixed(stage):
    """One step on two ranks beside the same written out: bf16 copies of parameters compute, their
    gradients are summed in bf16, fp32 masters are stepped."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    torch.manual_seed(0)
    model, loss = MAKE["mlp"]()
    masters = copy.deepcopy(model)
    zero = Zero(model, stage, precision="bf16", group=group)
    ours = torch.optim.AdamW(zero.param_groups, lr=1e-3)
    theirs = torch.optim.AdamW(masters.parameters(), lr=1e-3)
    for step in range(5):
        shares = [share("mlp", step, r) for r in range(2)]
        gradients = []
        for inputs, targets, _ in shares:
            low = copy.deepcopy(masters).bfloat16()
            (loss(low(inputs.bfloat16()).float(), targets) / 100).backward()
            gradients.append([one.grad for one in low.parameters()])
        for one, *both in zip(masters.parameters(), *gradients, strict=True):
            one.grad = (both[0] + both[1]).float()
        theirs.step()
        inputs, targets, _ = shares[rank]
        output = model(inputs)
        assert output.dtype == torch.float32
        (loss(output, targets) / 100).backward()
        zero.step(ours)
    with zero.gathered():
        for one, other in zip(model.parameters(), masters.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("stage", STAGES)
def test_mixed_precision_is_bf16_with_masters(five, stage):
    five.call(mixed, stage)


def many_micro_batches(stage, number=128):
    """How far the sum of many micro-batches' gradients is from the exact one, relatively."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    rows = torch.rand(2, number, 1, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    model = nn.Linear(16, 1, bias=False)
    zero = Zero(model, stage, precision="bf16", group=group)
    for row in rows[rank].float():
        with zero.no_sync():
            model(row).sum().backward()
    shares = zero.shard_gradients()
    sums = torch.zeros(16)
    sums[16 // 2 * rank :][: len(shares[0])] = shares[0].float()
    dist.all_reduce(sums, group=group)
    exact = rows.double().sum((0, 1, 2))
    return ((sums - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_in_bf16_are_summed_in_fp32(five, stage):
    assert five.call(many_micro_batches, stage)[0] < 1e-3  # in bf16: 9e-3


def untouched_and_beside():
    """What the docstring says of a parameter without a gradient."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    found = []
    for units in ["a", "b"], []:  # layer b is a unit by itself; or beside a, in the root
        model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        model.forward = lambda x, model=model: model["a"](x)
        zero = Zero(model, 2, units=map(model.get_submodule, units), group=group)
        optimizer = torch.optim.SGD(zero.param_groups, lr=0.1, weight_decay=0.5)
        before = model["b"].weight.detach().clone()
        model(torch.ones(1, 8)).sum().backward()
        zero.step(optimizer)
        found.append((model["b"].weight / before).mean().item())
    return found


def test_without_a_gradient_a_unit_is_left_alone_and_a_neighbour_decays(five):
    for found in five.call(untouched_and_beside)[:2]:
        assert found == [1.0, pytest.approx(0.95, abs=1e-6)]


# --- bad input -----------------------------------------------------------------------------------


class Branches(nn.Module):
    """Uses one of its layers, or both, or none: those that it was told to."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, use):
        for name in use:
            x = getattr(self, name)(x)
        return x


def gradient_on_some(stage):
    """Layer b on the last of three ranks only; then no backward at all on rank 1."""
    group, rank = first_ranks(3), dist.get_rank()
    if rank >= 3:
        return None
    found = []
    for uses in ("ab" if rank == 2 else "a"), ("" if rank == 1 else "a"):
        model = Branches()
        zero = Zero(model, stage, units=[] if stage == 3 else None, group=group)

        def step(uses=uses, zero=zero, model=model):
            if uses:
                model(torch.ones(4, 3), uses).square().sum().backward()
            else:
                zero.synchronize()

        found.append(message(step))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_on_some_ranks_only_is_named(five, stage):
    nothing = (
        "RuntimeError: rank 1 has no forward in this step: a rank without samples still has to "
        "run the model, on rows that the loss ignores"
        if stage == 3
        else "RuntimeError: parameter a.weight has a gradient on rank 0, 2, but none on rank 1; "
        "rank 1 has no gradient at all: a rank without samples still has to run the model, on "
        "rows that the loss ignores"
    )
    for found in five.call(gradient_on_some, stage)[:3]:
        assert found == [
            "RuntimeError: parameter b.weight has a gradient on rank 2, but none on rank 0, 1",
            nothing,
        ]


def absent(precision, with_root, joins):
    """No forward on rank 1 of three, in the first step and in a later one: what each says. The
    steps between are those of one that has never failed."""
    group, rank = first_ranks(3), dist.get_rank()
    if rank >= 3:
        return None
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    if with_root:
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    other = copy.deepcopy(model)

    def sharded(model):
        units = list(joined(model, 48)) if joins else None
        zero = Zero(model, 3, units=units, group=group, precision=precision)
        return zero, torch.optim.SGD(zero.param_groups, lr=0.1)

    (zero, optimizer), (fine, optimizer_of_fine) = sharded(model), sharded(other)

    def step(zero, optimizer):
        zero.model(torch.ones(rank + 1, 4)).square().sum().backward()
        zero.step(optimizer)

    def fails():
        if rank == 1:
            zero.step(optimizer)
        else:
            step(zero, optimizer)

    found = []
    for _ in range(2):
        found.append(message(fails))
        for _ in range(2):
            step(zero, optimizer)
            step(fine, optimizer_of_fine)
    with zero.gathered(), fine.gathered():
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("with_root, joins", [(False, False), (True, False), (False, True)])
def test_a_rank_without_a_forward_is_told_to_all(five, precision, with_root, joins):
    told = (
        "RuntimeError: rank 1 has no forward in this step: a rank without samples still has to run "
        "the model, on rows that the loss ignores"
    )
    assert five.call(absent, precision, with_root, joins)[:3] == [[told] * 2] * 3


def early_and_late_terms(stage):
    """A term of the loss on the parameters themselves, made before the forward and after it. (At
    stage 3 there are no parameters then, which torch finds out.)"""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    found = []
    for before in True, False:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        one = copy.deepcopy(model)
        zero = Zero(model, stage, group=group)

        def norm(before=before, model=model, zero=zero):
            weights = sum(p.square().sum() for p in model.parameters()) if before else 0
            loss = model(torch.ones(1, 4)).sum()
            if not before:
                weights = sum(p.square().sum() for p in model.parameters())
            (loss + weights).backward()
            return zero.clip_grad_norm_(1e9)

        if before:
            found.append(message(norm))
        else:
            (
                one(torch.ones(1, 4)).sum() + sum(p.square().sum() for p in one.parameters())
            ).backward()
            expected = nn.utils.get_total_norm([2 * p.grad for p in one.parameters()])
            torch.testing.assert_close(norm(), expected.item(), rtol=1e-5, atol=0)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_that_comes_too_late_is_not_lost(five, stage):
    for found in five.call(early_and_late_terms, stage)[:2]:
        assert found == [
            "RuntimeError: parameter 2.bias gets a gradient after its unit's backward has ended: "
            "use it outside the forward only after the forward, and run a separate backward for "
            "graphs from before the last backward"
        ]


class Failing(torch.autograd.Function):
    """Fails in the backward, if told to."""

    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fail:
            raise ValueError("a backward fails")
        return gradient, None


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, where=None):
        x = self.b(Failing.apply(self.a(x), where == "backward"))
        if where == "forward":
            raise ValueError("a forward fails")
        return self.c(x)


def failing(stage):
    """What a failed forward or backward, sums that nobody wants, and NaN leave behind."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    model, found = Fails(), []
    one = copy.deepcopy(model)
    zero = Zero(model, stage, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)

    def attempt(where=None, factor=1.0, step=True):
        (model(torch.ones(1, 4), where) * factor).square().sum().backward()
        zero.clip_grad_norm_(1e9)
        if step:
            zero.step(optimizer)

    found.append(message(attempt, "forward"))
    found.append(message(attempt, "backward"))
    found.append(message(attempt))
    found.append(message(zero.synchronize))
    zero.zero_grad()
    found.append(message(zero.clip_grad_norm_, 1.0))
    found.append(message(attempt, factor=float("nan")))
    found.append(message(attempt))
    zero.zero_grad()
    attempt(step=False)
    found.append(message(attempt))
    zero.zero_grad()
    attempt()  # and none of all that is in these gradients
    (2 * one(torch.ones(1, 4)).square().sum()).backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    with zero.gathered():
        for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_after_what_fails_the_next_step_is_right_or_refused(five, stage):
    for found in five.call(failing, stage)[:2]:
        assert found == [
            "ValueError: a forward fails",
            "ValueError: a backward fails",
            *2 * ["RuntimeError: the last backward did not finish: call zero_grad() first"],
            "RuntimeError: no parameter has a gradient in this step, on any rank: run a backward "
            "first",
            "FloatingPointError: the gradients' norm is nan",
            *[
                "RuntimeError: the gradient of parameter c.bias is summed and sharded over the "
                "ranks: use clip_grad_norm_() or shard_gradients() of Zero for it, "
                "and step() or zero_grad() "
                "before another backward (a forward that takes gradients itself has one: "
                "run all of a step's micro-batches in no_sync())"
            ]
            * 2,
        ]


def misuse():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None

    def model(inner=4):
        return nn.Sequential(nn.Linear(3, inner), nn.Linear(inner, 3))

    found = {
        "other shape": message(Zero, model(5 if rank else 4), 3, group=group),
        "stage": message(Zero, model(), 0, group=group),
        "precision": message(Zero, model(), 1, precision="fp16", group=group),
        "stages": message(Zero, model(), 1 + rank, group=group),
        "one stage": message(Zero, model(), 3 * rank, group=group),
        "frozen": message(Zero, model().requires_grad_(False), 1, group=group),
    }
    half = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3).double())
    found["double"] = message(Zero, half, 3, precision="bf16", group=group)
    assert half[0].weight.shape == (4, 3), "nothing has been changed"
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    found["norm"] = message(Zero, norm, 3, precision="bf16", group=group)
    one = model()
    found["units"] = message(Zero, one, 1, units=[one[rank]], group=group)
    found["empty"] = message(Zero, one, 1, units=[[]], group=group)
    found["twice a unit"] = message(Zero, one, 1, units=[one[1], (one[0], one[1])], group=group)
    found["nested"] = message(Zero, nn.Sequential(one), 1, units=[one, one[0]], group=group)
    found["foreign unit"] = message(Zero, one, 1, units=[nn.Linear(3, 3)], group=group)
    found["no group"] = message(
        Zero, one, 1, param_groups=[{"params": [one[0].weight]}], group=group
    )
    found["no group on one"] = message(
        Zero, one, 1, param_groups=[{"params": list(one.parameters())[rank:]}], group=group
    )
    found["foreign"] = message(
        Zero, one, 1, param_groups=[{"params": [nn.Parameter(torch.ones(3))]}], group=group
    )

    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    zero = Zero(two, 1, group=group, param_groups=[{"params": part.parameters()} for part in two])
    some = torch.optim.AdamW(zero.param_groups[0]["params"])
    found["one group"] = message(zero.step, some)
    zero.close()

    before = torch.optim.AdamW(one.parameters())
    zero = Zero(one, 3, group=group)
    found["before"] = message(zero.step, before)
    for kind in "Adafactor", "Muon", "LBFGS":
        params = zero.param_groups[0]["params"]
        matrix = [nn.Parameter(torch.ones(2, 2))]
        found[kind] = message(
            zero.step, getattr(torch.optim, kind)(matrix if kind == "Muon" else params)
        )

    class Mine(torch.optim.Adafactor):
        pass

    found["subclass"] = message(zero.step, Mine(zero.param_groups))
    found["no backward"] = message(zero.step, torch.optim.AdamW(zero.param_groups))
    found["state_dict"] = message(one.state_dict)

    two = model()
    zero = Zero(two, 1, group=group)

    def step(factor=1.0, backwards=1, clip=False):
        for _ in range(backwards):
            (two(torch.ones(1, 3)) * factor).sum().backward()
        if clip:
            zero.clip_grad_norm_(1.0)
        zero.step(torch.optim.SGD(zero.param_groups, lr=0.1))

    found["twice"] = message(step, 1.0, 2)
    two = model()
    zero = Zero(two, 2, group=group, check_finite=True)
    found["nan"] = message(step, float("nan") if rank else 1.0)
    two = model()
    zero = Zero(two, 3, group=group)
    found["nan norm"] = message(step, float("nan") if rank else 1.0, 1, True)
    found["limit"] = message(zero.clip_grad_norm_, -1.0)
    return found


def test_misuse_is_told(five):
    one, other = five.call(misuse)[:2]
    assert one == other
    assert one == {
        "other shape": "ValueError: parameter 0.weight has shape (4, 3) on rank 0 and (5, 3) on "
        "rank 1",
        "stage": "ValueError: stage must be 1, 2 or 3, not 0",
        "precision": "ValueError: precision must be 'fp32' or 'bf16', not 'fp16'",
        "stages": "ValueError: stage: 1 on rank 0, 2 on rank 1",
        "one stage": "ValueError: on rank 0: stage must be 1, 2 or 3, not 0",
        "units": "ValueError: units: ['0'] on rank 0, ['1'] on rank 1",
        "frozen": "ValueError: no parameter of this model requires a gradient",
        "double": "ValueError: mixed precision needs parameters in float32, but 1.weight is in "
        "torch.float64",
        "norm": "ValueError: 1 is a BatchNorm1d with running statistics in float32, so "
        "its weight cannot be in bf16: convert the statistics to bf16, make it without "
        "them (track_running_stats=False), or use precision='fp32', under autocast",
        "empty": "ValueError: a unit has no module",
        "twice a unit": "ValueError: module 1 is in the units twice",
        "nested": "ValueError: unit 0.0 lies in unit 0",
        "foreign unit": "ValueError: a unit has to be a module in the model, not Linear",
        "no group": "ValueError: parameter 0.bias requires a gradient and is in no group",
        "no group on one": "ValueError: on rank 1: parameter 0.weight requires a gradient and is "
        "in no group",
        "foreign": "ValueError: parameter group 0 has a parameter not in the model",
        "one group": "RuntimeError: this optimizer has 1 of the model's 2 shards: give one "
        "optimizer all param_groups of Zero, each with its own options",
        "before": "RuntimeError: this optimizer does not work on the shards of this model: make it "
        "after Zero, of its param_groups",
        **{
            kind: f"TypeError: {kind} works on whole parameters, and a rank has only shards"
            for kind in ("Adafactor", "Muon", "LBFGS")
        },
        "subclass": "TypeError: Adafactor works on whole parameters, and a rank has only shards",
        "no backward": "RuntimeError: no parameter has a gradient in this step, on any rank: run a "
        "backward first",
        "state_dict": "RuntimeError: this model is sharded: read it inside of Zero.gathered(), or "
        "save it by naranhi.checkpoint",
        "twice": "RuntimeError: the gradient of parameter 1.bias is summed and sharded over the "
        "ranks: use clip_grad_norm_() or shard_gradients() of Zero for it, "
        "and step() or zero_grad() "
        "before another backward (a forward that takes gradients itself has one: "
        "run all of a step's micro-batches in no_sync())",
        "nan": "FloatingPointError: the gradient of parameter 0.weight is not finite: so it is in "
        "the shard of rank 0, 1",
        "nan norm": "FloatingPointError: the gradients' norm is nan",
        "limit": "ValueError: max_norm must be above 0, not -1.0",
    }
