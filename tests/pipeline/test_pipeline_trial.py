"""Layers are tried on shapes before a step: nothing of that is seen in the step, or after it."""

import functools
import gc
import random
import weakref

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_loop import squared_error
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from naranhi import pipeline, schedules
from naranhi.autograd import FunctionLayer, Recompute, splittable
from naranhi.data_parallel import DDP
from naranhi.zero import Zero

ROWS, WIDTH, PARTS = 12, 8, 3


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, ROWS, WIDTH, generator=generator)


class Function(nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.linear(x))


def one_process(layers):
    """(loss, gradients) of a loop over the micro-batches."""
    total = 0
    for x, y in zip(*(one.chunk(PARTS) for one in batch()), strict=True):
        loss = squared_error(nn.Sequential(*layers)(x), y) / ROWS
        with torch.autocast("cpu", enabled=False):  # as torch's documentation has it
            loss.backward()
        total = total + loss.detach()
    return total, [one.grad for one in nn.ModuleList(layers).parameters()]


def differs(make, ranks=2, schedule=schedules.gpipe, context=None, **options):
    """On a rank: what is not equal, to the bit, to one process."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    layers = make()
    inputs, targets = batch()
    with context() if context else torch.enable_grad():
        random.seed(3)
        drawn = torch.get_rng_state()
        loss, gradients = one_process(expected)
        random.seed(3)
        torch.set_rng_state(drawn)
        with pipeline.Pipeline(
            layers, schedule(ranks, PARTS), squared_error, group=group, timeout=20.0, **options
        ) as pipe:
            found = pipe.step(inputs, targets, ROWS)
            mine = {id(one) for one in pipe.parameters()}
    wrong = [] if found is None or torch.equal(found, loss) else [f"loss {found} not {loss}"]
    names = [name for name, _ in nn.ModuleList(layers).named_parameters()]
    for name, one, gradient in zip(
        names, nn.ModuleList(layers).parameters(), gradients, strict=True
    ):
        if id(one) in mine and not torch.equal(one.grad, gradient):
            wrong.append(name)
    for module in nn.ModuleList(layers).modules():
        wrong += [
            f"{name} is fake" for name, one in vars(module).items() if isinstance(one, FakeTensor)
        ]
    return wrong


def refusal(make, **options):
    """On a rank: the error of a step, as "type: text"."""
    group, rank = first_ranks(2), dist.get_rank()
    torch.manual_seed(0)
    inputs, targets = batch()
    try:
        if rank >= 2:
            return pipeline.join_group_creation()
        with pipeline.Pipeline(
            make(), schedules.gpipe(2, PARTS), squared_error, group=group, timeout=20.0, **options
        ) as pipe:
            pipe.step(inputs, targets, ROWS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# --- autocast ------------------------------------------------------------------------------------


def bf16(cache=True):
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)


def linears():
    return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]


class Within(nn.Linear):
    """Has an autocast of its own."""

    def forward(self, x):
        with bf16():
            return super().forward(x)


def with_autocasts():
    return [Within(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Within(WIDTH, WIDTH)]


class Island(nn.Linear):
    """Computes in full precision, whatever is around it."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return functional.gelu(super().forward(x.float()))


def with_islands():
    return [Island(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Island(WIDTH, WIDTH)]


def recomputed():
    return [Recompute(nn.Sequential(*pair)) for pair in (with_islands(), with_autocasts())]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("make", [linears, with_autocasts, with_islands, recomputed])
def test_a_step_under_autocast(five, ranks, make):
    found = five.call(functools.partial(differs, make, ranks, context=bf16))
    assert found == [[]] * ranks + [None] * (5 - ranks)


def split_islands():
    return splittable(recomputed())


def test_a_split_backward_under_autocast(five):
    """To the bit as whole backwards, each of whose products has the dtype of its forward."""
    case = functools.partial(
        differs, split_islands, schedule=schedules.zero_bubble_h1, context=bf16
    )
    assert five.call(case)[:2] == [[], []]


# --- layers that keep something ------------------------------------------------------------------


class Rotary(nn.Module):
    """Makes its table when it first runs, and one for each length in a dictionary."""

    def __init__(self):
        super().__init__()
        self.linear, self.table, self.by_length = nn.Linear(WIDTH, WIDTH), None, {}

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(float(WIDTH)).cos()
        if len(x) not in self.by_length:
            self.by_length[len(x)] = torch.arange(float(len(x))).sin()
        return self.linear(x) * self.table + self.by_length[len(x)][:, None]


class Average(nn.Module):
    """Its buffer is a new tensor each time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x) - self.mean


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(WIDTH, WIDTH), 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        return self.linear(x) * self.calls


def keep(module, args, output):
    module.before = getattr(module, "before", 0.0) + output.detach()
    return output + module.before


def hooked():
    layers = linears()
    for layer in layers:
        layer.register_forward_hook(keep)
    return layers


def drawing():
    """Random numbers of Python's, which a trial does not draw; all on one rank, in order."""
    return [Function(lambda x: x * random.random()), nn.Linear(WIDTH, WIDTH)]


def rotary():
    return [Rotary() for _ in range(3)]


def averages():
    return [Average() for _ in range(3)]


def counting():
    return [Counting() for _ in range(3)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("make", [rotary, averages, counting, hooked, drawing])
def test_layers_that_keep_something(five, ranks, make):
    assert five.call(differs, make, ranks) == [[]] * ranks + [None] * (5 - ranks)


@functools.lru_cache
def mask(rows):
    return torch.ones(rows, 1)


def masked():
    mask.cache_clear()
    return [nn.Linear(WIDTH, WIDTH), Function(lambda x: x * mask(len(x))), nn.Linear(WIDTH, WIDTH)]


SEEN = []


def seen_outside():
    SEEN.clear()
    layers = linears()
    layers[2].register_forward_hook(lambda module, args, output: SEEN.append(output))
    return layers


@pytest.mark.parametrize(
    "make, layer", [(masked, "layer 1 (Function)"), (seen_outside, "layer 2 (Linear)")]
)
def test_what_is_kept_outside_of_the_layers_is_found(five, make, layer):
    for told in five.call(refusal, make)[:2]:
        for words in (
            f"ValueError: {layer} was tried on shapes",
            "kept outside of the layers",
            'trial="data"',
        ):
            assert words in told
    found = five.call(functools.partial(differs, make, trial="data"))
    assert found == [[], [], None, None, None]


class FakeOnce(nn.Module):
    """Returns, when it runs in earnest, what another trial on shapes has left in a cache."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x)
        if isinstance(x, FakeTensor) or not LEFT:
            return y
        return y * LEFT[0]


LEFT = []


def returns_fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    LEFT.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        LEFT.append(torch.ones(WIDTH))
    return [FakeOnce(), nn.Linear(WIDTH, WIDTH)]


def test_an_output_without_values_is_an_error_that_names_the_layer(five):
    told = five.call(refusal, returns_fake)
    assert "TypeError: layer 0 (FakeOnce) returned FakeTensor torch.float32" in told[0]
    assert told[1] is not None  # its peer is gone


# --- nothing stays -------------------------------------------------------------------------------


def alive(steps):
    """On a rank: of how many pipelines the weights live on, when nobody has them any more."""
    group, rank = first_ranks(2), dist.get_rank()
    known = []
    for _ in range(steps):
        if rank >= 2:
            pipeline.join_group_creation()
            continue
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Softmax(-1)) for _ in range(2)
        ]
        inputs, targets = batch()
        pipeline.run(
            schedules.gpipe(2, 3), layers, squared_error, inputs, targets, ROWS, group=group
        )
        known.append(weakref.ref(layers[rank][0].weight))
        del layers
    gc.collect()
    return sum(one() is not None for one in known)


def test_a_trial_keeps_no_weights(five):
    assert five.call(alive, 3) == [0] * 5


# --- what cannot be tried on shapes --------------------------------------------------------------


def in_place():
    return splittable(
        [
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
        ]
    )


@pytest.mark.parametrize("make_schedule", [schedules.gpipe, schedules.zero_bubble_h1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_in_place_may_be_the_first_of_a_stage(five, ranks, make_schedule):
    found = five.call(differs, in_place, ranks, make_schedule)
    assert found == [[]] * ranks + [None] * (5 - ranks)


def after_tanh():
    """What the tanh has saved is changed: one process refuses that."""
    return [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
    ]


def both_on_a_rank():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    schedule = schedules.Schedule(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"])
    inputs, targets = batch()
    with (
        pytest.raises(RuntimeError) as told,
        pipeline.Pipeline(after_tanh(), schedule, squared_error, group=group, timeout=20.0) as pipe,
    ):
        pipe.step(inputs, targets, ROWS)
    return str(told.value)


def test_what_another_stage_of_the_rank_has_saved_is_not_changed_unnoticed(five):
    assert "modified by an inplace operation" in five.call(both_on_a_rank)[1]


def needing(function):
    return [nn.Linear(WIDTH, WIDTH), Function(function), nn.Linear(WIDTH, WIDTH)]


def branching():
    return needing(lambda x: x if x.sum() > 0 else -x)


def item():
    return needing(lambda x: x * x.detach().abs().max().item())


def through_numpy():
    return needing(lambda x: x + torch.from_numpy(x.detach().numpy()))


def sorting():
    return needing(lambda x: x[x.sum(1).argsort().tolist()])


def drawing_a_number():
    return needing(lambda x: x * torch.rand(()).item())


@pytest.mark.parametrize("make", [branching, item, through_numpy, sorting, drawing_a_number])
def test_layers_that_need_values(five, make):
    """Refused with the way out; and the way out works."""
    for told in five.call(refusal, make)[:2]:
        for words in (
            "ValueError: layer 1 (Function) fails on torch.float32 (4, 8)",
            "layers are tried on shapes, without values",
            'trial="data"',
        ):
            assert words in told
    found = five.call(functools.partial(differs, make, trial="data"))
    assert found == [[], [], None, None, None]


def everything():
    return [
        Rotary(),
        Average(),
        Counting(),
        *in_place(),
        nn.BatchNorm1d(WIDTH),
        nn.Dropout(0.0),
        Recompute(nn.Linear(WIDTH, WIDTH)),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_trial_on_data_leaves_no_trace_either(five, ranks):
    found = five.call(functools.partial(differs, everything, ranks, trial="data"))
    assert found == [[]] * ranks + [None] * (5 - ranks)


def test_only_two_kinds_of_trial(five):
    for told in five.call(functools.partial(refusal, linears, trial="none"))[:2]:
        assert told == 'ValueError: trial is "shapes" or "data", not \'none\''


def sparse():
    return [
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Embedding(5, 4, sparse=True)),
        nn.Linear(WIDTH, WIDTH),
    ]


def renormed():
    layers = [nn.Embedding(WIDTH, WIDTH, max_norm=0.5), *linears()[1:]]
    layers[3].weight = layers[0].weight
    return layers


def owned(owner):
    layers = [nn.Sequential(layer) for layer in linears()]
    owner(layers[1], group=first_ranks(2))
    return layers


def lazy():
    return [nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)]


@pytest.mark.parametrize(
    "make, words",
    [
        (
            sparse,
            "layer 1 (Sequential), 0: Embedding with sparse=True has sparse gradients, which a "
            "pipeline cannot sum; make it with sparse=False",
        ),
        (
            lazy,
            "layer 1 (LazyLinear): the parameters of LazyLinear have no shape yet; run the layers "
            "on a micro-batch once, on every rank",
        ),
        *(
            (
                functools.partial(owned, owner),
                f"layer 1 (Sequential), 0: weight belongs to a {kind}, whose ranks would wait for "
                "each other in the backward: call close() on it, and pass the pipeline's replicas "
                "instead",
            )
            for kind, owner in (("DDP", DDP), ("Zero", functools.partial(Zero, stage=1)))
        ),
        (
            renormed,
            "0.weight has max_norm=0.5, so a forward changes the rows that it reads, and the "
            "copies on other ranks would diverge: make it without max_norm",
        ),
    ],
)
def test_layers_that_no_pipeline_can_have(five, make, words):
    """Refused on every rank before anything is sent."""
    for told in five.call(refusal, make)[:2]:
        assert told == f"ValueError: {words}"


def by_argument():
    first = nn.Linear(WIDTH, WIDTH)
    return [first, nn.Linear(WIDTH, WIDTH), FunctionLayer(functional.linear, first.weight)]


def by_closure():
    first = nn.Linear(WIDTH, WIDTH)
    return [first, nn.Linear(WIDTH, WIDTH), Function(lambda x: x @ first.weight)]


@pytest.mark.parametrize("trial", ["shapes", "data"])
@pytest.mark.parametrize("make", [by_argument, by_closure])
def test_a_weight_that_a_stage_uses_unregistered(five, make, trial):
    """It would not be tied to that of the stage that has it. In one stage, there is only one."""
    for told in five.call(functools.partial(refusal, make, trial=trial))[:2]:
        assert told.startswith(
            "ValueError: the stage that begins at layer 2 uses a parameter of shape (8, 8) that is "
            "registered in none of its layers"
        )
    assert five.call(functools.partial(differs, make, 1, trial=trial))[0] == []


def distributed():
    # Of all ranks: a smaller mesh would make groups here that the other ranks do not count.
    mesh = DeviceMesh("cpu", range(dist.get_world_size()))
    layers = linears()
    weight = DTensor.from_local(torch.ones(WIDTH, WIDTH), mesh, [Replicate()], run_check=False)
    layers[1].weight = nn.Parameter(weight)
    return refusal(lambda: layers)


def test_a_distributed_tensor_is_refused_by_name(five):
    for told in five.call(distributed)[:2]:
        assert told.startswith("ValueError: layer 1 (Linear): weight is a DTensor")


class Conjugate(nn.Module):
    """Complex, and its conjugate is only a mark on the tensor; likewise its imaginary part."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)

    def forward(self, x):
        x = x.to(torch.complex64) if not isinstance(x, tuple) else x[0] * x[1]
        y = self.linear(x).conj()
        return y, y.imag


class Real(nn.Module):
    def forward(self, value):
        return value[0].real + value[1]


def conjugates():
    return [Conjugate(), Conjugate(), Conjugate(), Real()]


def test_marks_of_conjugates_and_negatives_are_resolved(five):
    assert five.call(differs, conjugates, 4) == [[]] * 4 + [None]
