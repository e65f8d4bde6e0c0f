"""The finder is silent about correct steps of every form, and refuses what it cannot compare."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import Ranks
from torch import nn
from torch.nn import functional as F

from naranhi import divergence, models, schedules
from naranhi.autograd import Recompute
from naranhi.context_parallel import cut_sequence, split_sequence
from naranhi.data_parallel import DDP, all_reduce_gradients
from naranhi.distributed import Mesh
from naranhi.divergence.axes import Axes
from naranhi.divergence.classify import Held, classify, distance
from naranhi.divergence.random import _bits
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel import (
    gpt2_plan,
    mlp_plan,
    parallelize,
    vocabulary_cross_entropy,
)
from naranhi.zero import Zero, ZeroStages

ROWS, WIDTH = 8, 8


@pytest.fixture(scope="module")
def world():
    """`world(ranks, function, *args)`: its results on a world of so many ranks."""
    with Ranks(4, 60.0) as pool:
        yield pool.call_in_a_world


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, ROWS, WIDTH, generator=generator)


def linears(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *between, nn.Linear(WIDTH, WIDTH))


def squared_error(output, target):
    return (output - target).square().sum()


def backward(model, inputs, targets, microbatches=1):
    parts = zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)
    for some, wanted in parts:
        (squared_error(model(some), wanted) / ROWS).backward()


def raised(function, *args, **options):
    with pytest.raises(Exception) as error:
        function(*args, **options)
    return f"{type(error.value).__name__}: {error.value}"


# --- equal rows -----------------------------------------------------------------------------------

ORDERS = {
    "in a row": [0, 1, 2, 3, 4, 5, 6, 7],
    "every second": [0, 2, 4, 6, 1, 3, 5, 7],
    "shuffled": [5, 3, 0, 6, 2, 7, 4, 1],
    "one micro-batch after the other": [0, 1, 4, 5, 2, 3, 6, 7],
}


def equal_rows(order, equal):
    """On a rank: the words on a step of DDP, whose first rank takes the first half of an order."""
    inputs, targets = batch()
    inputs[equal] = inputs[equal[0]].clone()
    reference = divergence.trace(linears(), partial(backward, inputs=inputs, targets=targets))
    with Mesh(data=2) as mesh:
        own = torch.tensor(ORDERS[order]).chunk(2)[mesh.place.data]

        def run(parallel):
            with parallel.no_sync():
                backward(parallel.model, inputs[own[:2]], targets[own[:2]])
            backward(parallel.model, inputs[own[2:]], targets[own[2:]])

        report = divergence.find(DDP(linears(), mesh.data), run, reference, mesh=mesh)
    return str(report)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("equal", [[2, 5], [1, 2, 3, 4], [*range(ROWS)]])
def test_equal_rows_with_different_targets(world, order, equal):
    for report in world(2, equal_rows, order, equal):
        assert report == "no divergence: 24 tensors compared"


def equal_rows_but_wrong(wrong):
    """On a rank: where a step of DDP is wrong whose batch has equal rows."""
    inputs, targets = batch()
    inputs[5] = inputs[2]
    reference = divergence.trace(linears(), partial(backward, inputs=inputs, targets=targets))
    with Mesh(data=2) as mesh:
        rows, own = torch.arange(ROWS).chunk(2)[mesh.place.data], targets.clone()
        if wrong == "row":
            rows = torch.tensor([[0, 1, 2, 3], [2, 4, 5, 6]])[mesh.place.data]
        elif wrong == "target":
            own[5] = targets[2]
        else:
            own[5] = targets[6]
        run = lambda parallel: backward(parallel.model, inputs[rows], own[rows])  # noqa: E731
        report = divergence.find(DDP(linears(), mesh.data), run, reference, mesh=mesh)
    first = report.divergence
    return first.phase, first.ranks, first.what


@pytest.mark.parametrize(
    "wrong, expected",
    [
        (
            "row",
            (
                "data",
                (0, 1),
                "1 of 8 rows are taken more than once: row 2 by rank 0 (data 0) and rank ",
            ),
        ),
        ("target", ("gradient", (0, 1), "all ranks differ from one process")),
        ("other target", ("backward", (1,), "rank 1 (data 1) differs from one process")),
    ],
)
def test_equal_rows_hide_no_bug(world, wrong, expected):
    for phase, ranks, what in world(2, equal_rows_but_wrong, wrong):
        assert (phase, ranks) == expected[:2]
        assert what.startswith(expected[2])


def equal_halves():
    """On a rank: the words on rows that end alike, each split over context ranks."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    inputs, targets = torch.randn(2, ROWS, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs[:, 2:] = 0.0  # such as padding
    reference = divergence.trace(linears(), partial(backward, inputs=inputs, targets=targets))
    data, context = mesh.get_coordinate()
    own = [x[data::2].chunk(2, 1)[context] for x in (inputs, targets)]

    def run(model):
        backward(model, *own)
        for param in model.parameters():
            dist.all_reduce(param.grad)

    return str(divergence.find(linears(), run, reference, mesh=mesh))


def test_rows_that_differ_in_the_part_of_another_rank_only(world):
    for report in world(4, equal_halves):
        assert report.startswith("no divergence: ")


# --- outputs that are not by rows -----------------------------------------------------------------


class WithLoss(nn.Module):
    """A model that returns its loss, as a number or as a vector of them."""

    def __init__(self, dim):
        super().__init__()
        self.layers, self.dim = linears(nn.Tanh()), dim

    def forward(self, inputs, targets):
        loss = squared_error(self.layers(inputs), targets) / ROWS
        return loss if self.dim == 0 else loss[None]


def returns_its_loss(dim, microbatches):
    """On a rank: the words on a model that returns its loss."""
    inputs, targets = batch()

    def run(model, inputs, targets, microbatches=1):
        parts = zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)
        for some, wanted in parts:
            model(some, wanted).sum().backward()

    reference = divergence.trace(
        WithLoss(dim), partial(run, inputs=inputs, targets=targets, microbatches=microbatches)
    )
    with Mesh(data=2) as mesh:
        own = [x.chunk(2)[mesh.place.data] for x in (inputs, targets)]
        report = divergence.find(
            DDP(WithLoss(dim), mesh.data),
            lambda parallel: run(parallel.model, *own),
            reference,
            mesh=mesh,
        )
    return str(report)


@pytest.mark.parametrize("dim, microbatches", [(0, 1), (0, 2), (1, 1), (1, 2)])
def test_a_model_that_returns_its_loss(world, dim, microbatches):
    for report in world(2, returns_its_loss, dim, microbatches):
        assert report == "no divergence: 24 tensors compared"


class Flat(nn.Module):
    """A linear layer on tokens of all rows, one after the other."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x):
        return self.inner(x.reshape(-1, WIDTH // 2)).view(x.shape)


def flattened_tokens(microbatches, axis):
    """On a rank: the words on a model that flattens tokens."""
    inputs, targets = batch()
    reference = divergence.trace(
        linears(Flat()),
        partial(backward, inputs=inputs, targets=targets, microbatches=microbatches),
    )
    with Mesh(**{axis: 2}) as mesh:
        own = [x.chunk(mesh.sizes.data)[mesh.place.data] for x in (inputs, targets)]

        def run(model):
            backward(model, *own, microbatches=2)
            if axis == "data":
                for param in model.parameters():
                    dist.all_reduce(param.grad)

        return str(divergence.find(linears(Flat()), run, reference, mesh=mesh))


@pytest.mark.parametrize("axis", ["data", "tensor"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_flattened_tokens(world, microbatches, axis):
    for report in world(2, flattened_tokens, microbatches, axis):
        assert report.startswith("no divergence: ")


# --- random masks ---------------------------------------------------------------------------------


def off_by_a_rounding():
    """On a rank: the words on copies that differ by a rounding, with dropout."""
    inputs, targets = batch()
    run = partial(backward, inputs=inputs, targets=targets)
    model = linears(nn.Dropout(0.2))
    reference = divergence.trace(model, run)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].bias[0] = torch.nextafter(model[0].bias[0], torch.tensor(9.0))
    torch.manual_seed(5)
    with Mesh(tensor=2) as mesh:
        return str(divergence.find(model, run, reference, mesh=mesh))


def test_copies_that_differ_by_a_rounding_with_dropout(world):
    for report in world(2, off_by_a_rounding):
        assert report == "no divergence: 20 tensors compared"


def nothing_wrong():
    with Mesh(tensor=2) as mesh:
        axes = Axes(mesh)
    ones = torch.ones(3)
    held = {rank: Held(ones * (1 + rank * 2**-23), None, None, 2e-6) for rank in range(2)}
    return classify(held, axes)


def test_nothing_wrong_is_not_put_in_words(world):
    assert world(2, nothing_wrong)[0] == (None, None, "")


def trial_on_data():
    """On a rank: the words on a pipeline that tries its layers on a micro-batch."""
    inputs, targets = batch()
    reference = divergence.trace(
        linears(nn.Dropout(0.2)), partial(backward, inputs=inputs, targets=targets, microbatches=4)
    )
    schedule = schedules.gpipe(2, 4)
    with (
        Mesh(pipeline=2) as mesh,
        Pipeline(
            linears(nn.Dropout(0.2)), schedule, squared_error, group=mesh.pipeline, trial="data"
        ) as pipe,
    ):
        run = lambda pipe: pipe.step(inputs, targets, ROWS)  # noqa: E731
        return str(divergence.find(pipe, run, reference, mesh=mesh))


def test_masks_of_a_pipeline_s_trial(world):
    for report in world(2, trial_on_data):
        assert report == "no divergence: 28 tensors compared"


class DropsAtFirst(nn.Module):
    """Dropout in the first calls only."""

    def __init__(self, calls):
        super().__init__()
        self.left = calls

    def forward(self, x):
        self.left -= 1
        return F.dropout(x, 0.2) if self.left >= 0 else x


def fewer_masks(ranks_that_drop, calls):
    """On a rank: what is found if a layer draws in some micro-batches only, on some ranks."""
    inputs, targets = batch()
    run = partial(backward, inputs=inputs, targets=targets, microbatches=4)
    reference = divergence.trace(linears(DropsAtFirst(4)), run)
    model = linears(DropsAtFirst(calls if dist.get_rank() in ranks_that_drop else 4))
    torch.manual_seed(5)
    with Mesh(tensor=2) as mesh:
        report = divergence.find(model, run, reference, mesh=mesh)
    return report.divergence and (report.divergence.phase, report.divergence.layer)


@pytest.mark.parametrize("calls", [1, 3])
def test_masks_that_some_micro_batches_draw(world, calls):
    """If all ranks do, they agree; if one does, its output shows it."""
    assert world(2, fewer_masks, (0, 1), calls) == [None, None]
    assert world(2, fewer_masks, (1,), calls) == [("forward", "1")] * 2


# --- what is refused ------------------------------------------------------------------------------


def in_bf16(stage):
    inputs, targets = batch()
    reference = divergence.trace(linears(), partial(backward, inputs=inputs, targets=targets))
    with Mesh(data=2) as mesh:
        own = [x.chunk(2)[mesh.place.data] for x in (inputs, targets)]
        zero = Zero(linears(), stage, group=mesh.data, precision="bf16")
        run = lambda zero: backward(zero.model, *own)  # noqa: E731
        return raised(divergence.find, zero, run, reference, mesh=mesh)


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_in_bf16_is_refused(world, stage):
    for words in world(2, in_bf16, stage):
        assert words == (
            "ValueError: a Zero of precision 'bf16' computes in a different dtype from the model "
            "of one process, so it rounds differently: compare one of precision 'fp32'"
        )


def sharded_stages(level):
    inputs, targets = batch()
    reference = divergence.trace(
        linears(), partial(backward, inputs=inputs, targets=targets, microbatches=2)
    )
    schedule = schedules.with_sharding(schedules.gpipe(1, 2), level)
    with Mesh(data=2) as mesh:
        own = [x.chunk(2)[mesh.place.data] for x in (inputs, targets)]
        with Pipeline(
            linears(),
            schedule,
            squared_error,
            group=mesh.pipeline,
            replicas=mesh.data,
            sharding=ZeroStages,
        ) as pipe:
            run = lambda pipe: pipe.step(*own, ROWS)  # noqa: E731
            return raised(divergence.find, pipe, run, reference, mesh=mesh)


@pytest.mark.parametrize("level", [2, 3])
def test_a_pipeline_of_sharded_stages_is_refused(world, level):
    for words in world(2, sharded_stages, level):
        assert words == (
            "ValueError: a Pipeline with sharded stages has no whole gradients to compare: compare "
            "one without sharding, whose schedule does not gather"
        )


class Positions(nn.Module):
    """A linear layer and a vector for each position."""

    def __init__(self, number):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(number, WIDTH))

    def forward(self, x):
        return x + self.positions[: len(x)].sum(0)


def other_shape(kind):
    """On a rank: the words on a parameter that has another shape in the reference."""
    inputs, targets = batch()
    run = partial(backward, inputs=inputs, targets=targets, microbatches=2)
    whole, model = linears(Positions(6)), linears(Positions(4))
    with Mesh(pipeline=2) as mesh:
        if kind == "stage":
            reference = divergence.trace(whole, run)
            schedule = schedules.gpipe(2, 2)
            with Pipeline(model, schedule, squared_error, group=mesh.pipeline) as pipe:
                run = lambda pipe: pipe.step(inputs, targets, ROWS)  # noqa: E731
                return raised(divergence.find, pipe, run, reference, mesh=mesh)
        if kind == "shards":
            whole, model = nn.Sequential(Mlp(16)), nn.Sequential(Mlp(18))
            parallelize(model, mlp_plan(), mesh.pipeline)
        if kind == "zero":
            model = Zero(model, 3, group=mesh.pipeline)
        reference = divergence.trace(whole, run)
        return raised(divergence.find, model, run, reference, mesh=mesh)


class Mlp(nn.Module):
    """Two linear layers with `hidden` neurons between them."""

    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(self.up(x))


@pytest.mark.parametrize(
    "kind, parameter, shapes",
    [
        ("stage", "1.positions", ((4, WIDTH), (6, WIDTH))),
        ("zero", "1.positions", ((4, WIDTH), (6, WIDTH))),
        ("shards", "0.down.weight", ((WIDTH, 18), (WIDTH, 16))),
    ],
)
def test_a_parameter_of_another_shape(world, kind, parameter, shapes):
    for words in world(2, other_shape, kind):
        assert words == (
            f"ValueError: rank 0 has a parameter {parameter} of shape {shapes[0]} before the "
            f"split, but it has the shape {shapes[1]} in the model of one process: trace the same "
            "model"
        )


def test_a_mask_without_rows_is_recorded():
    class DropsPath(nn.Module):
        def forward(self, x):
            return x * torch.empty(()).bernoulli_(0.5)

    inputs, targets = batch()
    reference = divergence.trace(
        linears(DropsPath()), partial(backward, inputs=inputs, targets=targets)
    )
    assert list(reference.masks.values()) == [1]


# --- two axes of one size -------------------------------------------------------------------------

WORDS = 19


def gpt2():
    torch.manual_seed(0)
    config = models.gpt2_config(WORDS, 16, hidden=16, heads=4, blocks=1)
    return models.gpt2(config, tied=False, dropout=0.0)


def on_two_axes(length, broken):
    """The finder's first divergence where the sequence and layers are both divided by two."""
    tokens = torch.randint(WORDS, (4, length), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    reference = divergence.trace(
        gpt2(),
        lambda layers: (
            models.loss(nn.Sequential(*layers)(tokens), targets) / targets.numel()
        ).backward(),
    )
    with Mesh(tensor=2, context=2) as mesh:
        layers = gpt2()
        parallelize(layers, gpt2_plan(), mesh.tensor)
        cut_sequence(layers, mesh.context)
        model = nn.Sequential(*layers)
        own = split_sequence(targets, mesh.context)

        def step(layers):
            loss = vocabulary_cross_entropy(model(tokens), own, mesh.tensor)
            (loss / targets.numel()).backward()
            if not broken:
                all_reduce_gradients(model, mesh.context)

        first = divergence.find(layers, step, reference, mesh=mesh).divergence
    return first and (first.phase, first.axis)


@pytest.mark.parametrize("length", [12, 16])  # 16 is also what a layer's inputs are
def test_nothing_is_found_where_context_and_tensor_have_one_size(world, length):
    assert world(4, on_two_axes, length, False) == [None] * 4
    assert all(found == ("gradient", "context") for found in world(4, on_two_axes, length, True))


def recomputed_under_zero():
    """The finder's first divergence in a model with recomputed layers, in shards."""
    inputs, targets = batch()
    reference = divergence.trace(linears(), lambda model: backward(model, inputs, targets))
    with Mesh(data=4) as mesh:
        model = linears()
        model[0] = Recompute(model[0])
        own = slice(2 * mesh.place.data, 2 * mesh.place.data + 2)
        report = divergence.find(
            Zero(model, 2),
            lambda zero: backward(zero.model, inputs[own], targets[own]),
            reference,
            mesh=mesh,
        )
    return report.divergence


def test_layers_that_zero_recomputes_have_their_own_names(world):
    assert world(4, recomputed_under_zero) == [None] * 4


# --- forms of a step ------------------------------------------------------------------------------


def found(make, alone, parallel=backward):
    """On a rank: the words on a step of DDP over two data ranks."""
    inputs, targets = batch()
    reference = divergence.trace(make(), partial(alone, inputs=inputs, targets=targets))
    with Mesh(data=2) as mesh:
        own = torch.arange(ROWS).chunk(2)[mesh.place.data]
        run = partial(parallel, inputs=inputs[own], targets=targets[own])
        report = divergence.find(
            DDP(make(), mesh.data), lambda ddp: run(ddp.model), reference, mesh=mesh
        )
        return str(report)


def one_backward(model, inputs, targets):
    """One backward of all micro-batches, which runs through the last of them first."""
    parts = zip(inputs.chunk(2), targets.chunk(2), strict=True)
    sum(squared_error(model(some), wanted) / ROWS for some, wanted in parts).backward()


def halve(param):
    param.grad.mul_(0.5)


def hooked(late):
    """A hook on a parameter halves its gradient, and an attribute of it is read in the forward."""
    model = linears()
    if late:
        model[0].weight.register_post_accumulate_grad_hook(halve)
    else:
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    model[0].weight.scale = 2.0
    model[0].register_forward_hook(lambda layer, _, output: output * layer.weight.scale)
    return model


FORMS = {
    "one backward": lambda: found(linears, one_backward),
    "hook": lambda: found(partial(hooked, False), backward),
    "mask": lambda: found(Masked, masked, masked),
    "mask with a row for each row": lambda: found(Masked, masked_by_rows, masked_by_rows),
    "recurrent": lambda: found(Recurrent, backward),
    "positions, row by row": lambda: found(OneTable, partial(backward, microbatches=ROWS)),
}


class Masked(nn.Module):
    """Mix the positions of each row by a mask that all rows share, after a scale in one number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(2, 2)

    def forward(self, x, mask, scale):
        x = x.unflatten(1, (-1, 2))
        return (mask.tril() @ self.mix(x) * scale).flatten(1)


def masked(model, inputs, targets):
    mask = torch.linspace(-1, 1, 16).view(4, 4)
    output = model(inputs, mask, torch.tensor(0.5))
    (squared_error(output, targets) / ROWS).backward()


def masked_by_rows(model, inputs, targets):
    """The mask has as many rows as the batch of one process."""
    mask = torch.linspace(-1, 1, 64).view(8, 8)
    output = model(inputs.repeat(1, 2), mask, torch.tensor(0.5))
    (squared_error(output, targets.repeat(1, 2)) / ROWS).backward()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(2, 3, num_layers=2, batch_first=True)

    def forward(self, x):
        output, (hidden, _) = self.lstm(x.unflatten(1, (-1, 2)))
        return (output.sum((1, 2)) + hidden[-1].sum(1))[:, None]


class OneTable(nn.Module):
    """The table has one row, which is added to all rows of a micro-batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(1, WIDTH)

    def forward(self, x):
        return self.linear(x + self.table(torch.zeros(1, dtype=torch.long)))


def found_in(form):
    return FORMS[form]()


@pytest.mark.parametrize("form", FORMS)
def test_steps_of_these_forms(world, form):
    for report in world(2, found_in, form):
        assert report.startswith("no divergence: ")


def hooked_after_accumulation():
    inputs, targets = batch()
    run = partial(backward, inputs=inputs, targets=targets)
    reference = divergence.trace(hooked(True), run)
    with Mesh(tensor=2) as mesh:
        return str(divergence.find(hooked(True), run, reference, mesh=mesh))


def test_a_hook_after_the_accumulation(world):
    for report in world(2, hooked_after_accumulation):
        assert report.startswith("no divergence: ")


class Shares(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.linear, self.factor = shared, nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x):
        return self.factor * torch.tanh(self.linear(self.shared(x)))


def shared_in_a_pipeline(factor):
    """Four blocks share a module without parameters, such as rotary positions."""
    inputs, targets = batch()

    def made():
        torch.manual_seed(0)
        shared = nn.Identity()
        return [Shares(shared) for _ in range(4)]

    def alone(layers):
        backward(nn.Sequential(*layers), inputs, targets, microbatches=2)

    reference = divergence.trace(made(), alone)
    layers = made()
    layers[1].factor = factor
    with (
        Mesh(pipeline=2) as mesh,
        Pipeline(layers, schedules.gpipe(2, 2), squared_error, group=mesh.pipeline) as pipeline,
    ):
        step = lambda pipeline: pipeline.step(inputs, targets, ROWS)  # noqa: E731
        return str(divergence.find(pipeline, step, reference, mesh=mesh))


def test_blocks_of_a_pipeline_that_share_a_module(world):
    for report in world(2, shared_in_a_pipeline, 1.0):
        assert report.startswith("no divergence: ")
    for report in world(2, shared_in_a_pipeline, 1.5):
        assert report.startswith(
            "1, forward, micro-batch 0: rank 0 (pipeline 0) differs from one process by a factor"
        )


def test_imaginary_parts_count():
    value = torch.tensor([1 + 2j])
    assert distance(value, torch.tensor([1 + 2.5j])) == 0.5 and distance(value, value) == 0


@pytest.mark.parametrize(
    "rate, elements, bits", [(0.5, 32, 32), (0.01, 3200, 92.3), (0.0, 1000, 0.0)]
)
def test_equal_masks_are_told_by_what_they_say(rate, elements, bits):
    mask = torch.ones(elements)
    mask[: round(rate * elements)] = 0
    assert _bits(mask) == pytest.approx(bits, rel=1e-2)
