"""Data parallelism on real ranks, against one process that accumulates the ranks' shares."""

import copy
import re
from contextlib import nullcontext
from functools import partial
from itertools import chain, product

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
    mlp,
    same_bits_everywhere,
    share,
    tied_gpt2,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from naranhi import data_parallel
from naranhi.collectives.buckets import buckets
from naranhi.data_parallel import DDP, all_reduce_bucketed, all_reduce_gradients, global_count
from naranhi.zero import Zero

SMALL = 3000  # bytes of a bucket: several, of several parameters each


def by_sum(model, group):
    data_parallel.broadcast_parameters(model, group)
    return nullcontext, lambda: all_reduce_gradients(model, group)


def by_buckets(model, group):
    data_parallel.broadcast_parameters(model, group)
    return nullcontext, lambda: all_reduce_bucketed(model, group, SMALL)


def overlapped(model, group):
    return DDP(model, group, bucket_bytes=SMALL).no_sync, lambda: None


WAYS = {"sum": by_sum, "buckets": by_buckets, "overlapped": overlapped}


def backward(way, microbatches, model, loss, count):
    """The backwards of a step on a rank; way is what a function of WAYS returned."""
    no_sync, after = way
    with no_sync():
        for inputs, targets, _ in microbatches[:-1]:
            (loss(model(inputs), targets) / count).backward()
    inputs, targets, _ = microbatches[-1]
    (loss(model(inputs), targets) / count).backward()
    after()


def training(ranks, work, optimizer):
    """On rank 0, by way: how far parameters are from those of one process after `STEPS` steps."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    expected, apart = alone(ranks, work, optimizer) if rank == 0 else None, {}
    for name, make_way in WAYS.items():
        torch.manual_seed(rank)  # another start on each rank, until they are made equal
        model, loss = MAKE[work]()
        way, stepper = make_way(model, group), OPTIMIZERS[optimizer](model.parameters())
        for step in range(STEPS):
            mine = share(work, step, rank)
            count = global_count(mine[2], group)
            stepper.zero_grad()
            backward(way, [mine], model, loss, count)
            stepper.step()
        assert same_bits_everywhere(model, group), name
        if rank == 0:
            apart[name] = largest_differences(model, expected)
    return apart


@pytest.mark.parametrize("work", MAKE)
@pytest.mark.parametrize("ranks, optimizer", [(1, "momentum"), *product([2, 3, 4], OPTIMIZERS)])
def test_training_equals_one_process(five, ranks, optimizer, work):
    """To the bit on 1 and 2 ranks; sums of 3 or 4 are taken in another order."""
    apart = five.call(training, ranks, work, optimizer)[0]
    assert set(apart) == set(WAYS)
    for real, idle in apart.values():
        if ranks <= 2:
            assert real == idle == 0.0
        else:
            assert real <= 1e-6
            kind, *rate = optimizer.split()
            assert idle <= (2 * STEPS * float(rate[0]) if kind == "adamw" else 1e-6)


def accumulation(work):
    """Three micro-batches on each of two ranks, one with nothing valid in it, two steps."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    sizes = [(2, 1, 3), (1, 2, 0)]
    for name, make_way in WAYS.items():
        torch.manual_seed(0)
        alone, loss = MAKE[work]()
        model = copy.deepcopy(alone)
        way = make_way(model, group)
        for step in range(2):
            shares = [
                [share(work, 3 * step + k, r, rows) for k, rows in enumerate(sizes[r])]
                for r in range(2)
            ]
            count = sum(valid for row in shares for _, _, valid in row)
            assert global_count(sum(valid for _, _, valid in shares[rank]), group) == count
            totals = []
            for row in shares:  # each share by itself, then their sum
                alone.zero_grad()
                for inputs, targets, _ in row:
                    (loss(alone(inputs), targets) / count).backward()
                totals.append([one.grad for one in alone.parameters()])
            model.zero_grad()
            backward(way, shares[rank], model, loss, count)
            for one, first, second in zip(model.parameters(), *totals, strict=True):
                assert torch.equal(one.grad, first + second), name


@pytest.mark.parametrize("work", MAKE)
def test_gradients_accumulate_over_micro_batches(five, work):
    five.call(accumulation, work)


def order_of_events():
    """What `DDP` tells during a step of two micro-batches; its buckets by names."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model, loss = mlp()
    told, sums, original = [], [], dist.all_reduce

    def counted(*args, **kwargs):
        sums.append(len(told))
        return original(*args, **kwargs)

    parallel = DDP(model, group, bucket_bytes=SMALL, on_event=lambda *event: told.append(event))
    inputs, targets, _ = share("mlp", 0, rank)
    dist.all_reduce = counted
    try:
        with parallel.no_sync():
            loss(model(inputs), targets).backward()
        assert not told and not sums  # this one talks to nobody
        local = [one.grad.clone() for one in model.parameters()]
        loss(model(inputs), targets).backward()
    finally:
        dist.all_reduce = original
    assert len(sums) == len(parallel.buckets)
    assert not torch.equal(local[0] * 2, next(model.parameters()).grad)
    parallel.close()
    model.zero_grad()
    before = len(told)
    loss(model(inputs), targets).backward()  # and nobody listens any more
    assert len(told) == before
    return told, [[parallel.names[one] for one in bucket.views] for bucket in parallel.buckets]


def test_the_first_bucket_starts_before_the_backward_ends(five):
    for told, names in five.call(order_of_events)[:2]:
        assert len(names) >= 2
        assert list(chain(*names)) == [name for name, _ in mlp()[0].named_parameters()][::-1]
        gradients = [place for place, (event, _) in enumerate(told) if event == "gradient"]
        starts = [place for place, (event, _) in enumerate(told) if event == "start"]
        inside = len(told) - len(names)
        assert starts[0] < gradients[-1] < starts[-1] < inside
        assert [what for event, what in told if event == "start"] == list(range(len(names)))
        for i, bucket in enumerate(names):  # each as soon as it is full, and no sooner
            before = [what for event, what in told[: starts[i]] if event == "gradient"]
            assert set(bucket) <= set(before)
        assert told[inside:] == [("end", i) for i in range(len(names))]


class Branches(nn.Module):
    """Uses one of its layers, or both: those that it was told to; a batch norm for its buffers."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, use):
        for name in use:
            x = getattr(self, name)(x)
        return self.norm(x) * self.frozen


def no_gradient_anywhere():
    """A parameter that is not used on any rank keeps no gradient, and a later one may be another;
    one that had its gradient in an earlier micro-batch only counts."""
    group, rank = first_ranks(3), dist.get_rank()
    if rank >= 3:
        return
    for make_way in WAYS.values():
        torch.manual_seed(rank)
        model = Branches()
        way = make_way(model, group)
        for uses in ("a", "b"), ("b",), ("a",):
            model.zero_grad()
            alone = copy.deepcopy(model)
            xs = [
                torch.randn(4, 3, generator=torch.Generator().manual_seed(10 + r)) for r in range(3)
            ]
            for use in uses:
                for x in xs:
                    alone(x, use).square().sum().backward()
            no_sync, after = way
            with no_sync():
                for use in uses[:-1]:
                    model(xs[rank], use).square().sum().backward()
            model(xs[rank], uses[-1]).square().sum().backward()
            after()
            for (name, one), other in zip(
                model.named_parameters(), alone.parameters(), strict=True
            ):
                assert (one.grad is None) == (other.grad is None), (name, uses)
                if one.grad is not None:
                    torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
            assert model.unused.grad is None
            if make_way is overlapped:  # its end gives all ranks rank 0's buffers
                mean = [torch.empty(3) for _ in range(3)]
                dist.all_gather(mean, model.norm.running_mean, group=group)
                assert torch.equal(mean[0], mean[1]) and torch.equal(mean[0], mean[2])
                assert mean[0].any()


def test_parameters_without_a_gradient_and_buffers(five):
    five.call(no_gradient_anywhere)


class Growing(nn.Linear):
    """Keeps a row of each batch in a buffer."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("seen", torch.zeros(0, 3))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x[:1].detach()])
        return super().forward(x)


def other_buffers(listener):
    """On a rank: errors, of buffers that grow on all ranks alike, and then on one alone."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = nn.Sequential(Growing(), nn.BatchNorm1d(3))
    parallel = Zero(model, 2, group=group) if listener == "Zero" else DDP(model, group)
    x = torch.full((2, 3), 1.0 + rank)
    model(x).sum().backward()
    assert torch.equal(model[0].seen, torch.ones(1, 3))
    model.zero_grad() if listener == "DDP" else parallel.zero_grad()
    if rank == 1:
        model(x)
    return message(model(x).sum().backward)


@pytest.mark.parametrize("listener", ["DDP", "Zero"])
def test_buffers_that_differ_are_told_on_every_rank(five, listener):
    words = "ValueError: buffer 0.seen has shape (2, 3) on rank 0 and (3, 3) on rank 1"
    assert five.call(other_buffers, listener)[:2] == [words] * 2


def layouts(way):
    """A convolution in channels_last, and complex weights of which the conjugate is used: a fused
    optimizer reads the memory of both, whatever the strides."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model.scale = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    alone = copy.deepcopy(model)
    _, after = way(model, group)
    xs = torch.randn(2, 2, 3, 5, 5)

    def loss(model, x):
        return (model(x).mean((2, 3)) * model.scale.conj()).abs().square().sum()

    loss(model, xs[rank]).backward()
    after()
    for x in xs:
        loss(alone, x).backward()
    for each in model, alone:
        torch.optim.SGD([each.weight], lr=0.5, fused=True).step()
    torch.testing.assert_close(model.weight, alone.weight)
    torch.testing.assert_close(model.scale.grad, alone.scale.grad)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_have_the_layout_of_their_parameters(five, way):
    five.call(layouts, WAYS[way])


def other_layouts():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = nn.Conv2d(3, 4, 3)
    return message(DDP, model.to(memory_format=torch.channels_last) if rank else model, group)


def test_ranks_with_other_layouts_are_told(five):
    for text in five.call(other_layouts)[:2]:
        assert text.startswith("ValueError: memory layout: {} on rank 0, {'weight': (27, 1, 9, 3)}")


def message(function, *args):
    try:
        function(*args)
    except (ValueError, RuntimeError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def gradient_on_some(way):
    """Layer b on the last of three ranks only; then nothing at all on rank 1."""
    group, rank = first_ranks(3), dist.get_rank()
    if rank >= 3:
        return None
    model = Branches()
    no_sync, after = WAYS[way](model, group)
    x, found = torch.randn(4, 3), []
    for uses in ("ab" if rank == 2 else "a"), ("" if rank == 1 else "a"):
        model.zero_grad()

        def step(uses=uses):
            total = model(x, uses).square().sum()
            if uses:
                total.backward()
                after()
            elif way == "overlapped":
                no_sync.__self__.synchronize()
            else:
                after()

        found.append(message(step))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_on_some_ranks_only_is_named(five, way):
    for found in five.call(gradient_on_some, way)[:3]:
        assert found == [
            "RuntimeError: parameter b.weight has a gradient on rank 2, but none on rank 0, 1",
            "RuntimeError: parameter a.weight has a gradient on rank 0, 2, but none on rank 1; "
            "rank 1 has no gradient at all: a rank without samples still has to run the model, on "
            "rows that the loss ignores",
        ]


def other_frozen(way):
    """Each rank freezes another layer; then the last rank alone freezes one."""
    group, rank = first_ranks(3), dist.get_rank()
    if rank >= 3:
        return None
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    _, after = WAYS[way](model, group)
    found = []
    for frozen in rank, 1 if rank == 2 else None:
        model.zero_grad()
        for number, layer in enumerate(model):
            layer.requires_grad_(number != frozen)

        def step():
            model(torch.ones(2, 3)).square().sum().backward()
            after()

        found.append(message(step))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_freeze_other_parameters_are_named(five, way):
    """They were summed with one another."""
    for found in five.call(other_frozen, way)[:3]:
        assert found == [
            "RuntimeError: parameter 0.weight has a gradient on rank 1, 2, but none on rank 0",
            "RuntimeError: parameter 1.weight has a gradient on rank 0, 1, but none on rank 2",
        ]


def other_models():
    group, rank = first_ranks(3), dist.get_rank()
    if rank >= 3:
        return None

    def model(inner=4, dtype=None, more=0, bias=True, buffer=3):
        layers = [nn.Linear(3, inner, bias=bias, dtype=dtype), *(nn.ReLU(),) * more]
        one = nn.Sequential(nn.Sequential(*layers), nn.Linear(inner, 3))
        one.register_buffer("scale", torch.ones(buffer))
        return one

    frozen = model()
    frozen[1].weight.requires_grad = False
    kinds = [model(inner=5), model(dtype=torch.float64), model(bias=False), model(buffer=4), frozen]
    return [message(DDP, kind if rank == 2 else model(), group) for kind in kinds]


def test_models_that_differ_are_told_before_training(five):
    for found in five.call(other_models)[:3]:
        assert found == [
            "ValueError: parameter 0.0.weight has shape (4, 3) on rank 0 and (5, 3) on rank 2",
            "ValueError: parameter 0.0.weight has dtype torch.float32 on rank 0 and torch.float64 "
            "on rank 2",
            "ValueError: rank 0 has a parameter 0.0.bias, rank 2 has none",
            "ValueError: buffer scale has shape (3,) on rank 0 and (4,) on rank 2",
            "ValueError: parameter 1.weight has requires_grad True on rank 0 and False on rank 2",
        ]


def misuse():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = mlp()[0]
    parallel = DDP(model, group, check_finite=True)
    x = torch.ones(2, 8)

    def step(factor=1.0, backwards=1):
        for _ in range(backwards):
            (model(x) * factor).sum().backward()

    found = [message(step), message(step)]
    model.zero_grad(set_to_none=False)
    found.append(message(lambda: model(x).sum().backward()))
    model.zero_grad()
    found.append(message(step, 1.0, 2))
    found.append(message(parallel.synchronize))
    model.zero_grad()
    found.append(message(step, float("nan") if rank else 1.0))
    model.zero_grad()
    found += [message(step), message(global_count, 0, group)]
    found.append(message(partial(DDP, mlp()[0], group, bucket_bytes=0)))
    return found


def test_misuse_is_told(five):
    left = "RuntimeError: parameter 2.down.bias still has the gradient of the step before"
    for found in five.call(misuse)[:2]:
        for text, wanted in zip(
            found,
            [
                None,
                *[left] * 4,
                "FloatingPointError: the gradient of parameter 0.up.weight (and of 11 more) is not "
                "finite",
                None,
                "ValueError: `count` is 0 on every rank in this step: there is no loss to average",
                "ValueError: bucket_bytes must be positive, not 0",
            ],
            strict=True,
        ):
            assert text == wanted or re.match(re.escape(wanted), text), found


def beside_torch():
    """Gradients of torch's own, which averages: so its loss is multiplied by the ranks."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    torch.manual_seed(0)
    ours, loss = tied_gpt2()
    theirs = DistributedDataParallel(copy.deepcopy(ours), process_group=group)
    DDP(ours, group, bucket_bytes=SMALL)  # which the model keeps
    inputs, targets, valid = share("tied gpt2", 0, rank)
    count = global_count(valid, group)
    (2 * loss(theirs(inputs), targets) / count).backward()
    (loss(ours(inputs), targets) / count).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-6)


def test_gradients_are_those_of_distributed_data_parallel(five):
    five.call(beside_torch)


class Thrice(nn.Module):
    """Three layers with one weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        for layer in self.layers:
            layer.weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def tied_thrice():
    """On rank 0, by what trains it: how far a weight used thrice is from one process's."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    start, batch = Thrice(), torch.randn(2, 6, 4, dtype=torch.float64)
    ways = {
        "one process": lambda model: None,
        "torch": lambda model: DistributedDataParallel(model, process_group=group),
        "DDP": lambda model: DDP(model, group),
        **{f"Zero {stage}": partial(Zero, stage=stage, group=group) for stage in (1, 2, 3)},
    }
    weights = {}
    for name, make_way in ways.items():
        model = copy.deepcopy(start)
        way, is_zero = make_way(model), name.startswith("Zero")
        x, y = batch if name == "one process" else batch[:, rank::2]
        params = way.param_groups if is_zero else model.parameters()
        optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9)
        for _ in range(30):
            model.zero_grad()
            output = way(x) if name == "torch" else model(x)
            loss = (output - y).square().sum()
            (2 * loss if name == "torch" else loss).backward()  # torch takes the mean
            way.step(optimizer) if is_zero else optimizer.step()
        with way.gathered() if is_zero else nullcontext():
            weights[name] = model.layers[0].weight.detach().clone()
    moved = (weights["one process"] - start.layers[0].weight).abs().max().item()
    expected = weights.pop("one process")
    return moved, {name: (one - expected).abs().max().item() for name, one in weights.items()}


def test_a_weight_used_thrice_is_that_of_one_process(five):
    """In float64, where rounding cannot be taken for another gradient: 30 steps of SGD in float32
    may carry it anywhere, torch's own as ours."""
    moved, apart = five.call(tied_thrice)[0]
    assert moved > 0.1
    assert all(distance < 1e-12 for distance in apart.values()), apart


def test_buckets_are_cut_by_size_from_the_last():
    a, b, c, d = (torch.zeros(n) for n in (10, 30, 10, 10))  # 40, 120, 40, 40 bytes
    e = torch.zeros(5, dtype=torch.float64)

    def cut(size):
        return [[id(one) for one in bucket] for bucket in buckets([a, b, e, c, d], size)]

    def ids(*rows):
        return [[id(one) for one in row] for row in rows]

    assert cut(80) == ids([d, c], [b], [a], [e]), "one that is too long stands alone"
    assert cut(1) == ids([d], [c], [b], [a], [e])
    assert cut(1000) == ids([d, c, b, a], [e]), "one dtype each"
    assert buckets([], 80) == []


def test_a_share_of_nothing_has_gradients_of_zero():
    for work in MAKE:
        model, loss = MAKE[work]()
        inputs, targets, valid = share(work, 0, 0, rows=0)
        assert valid == 0
        loss(model(inputs), targets).backward()
        assert all(one.grad is not None and not one.grad.any() for one in model.parameters())
