"""The finder is silent where ranks are right, and finds the place where they are made wrong."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from naranhi import divergence, models, schedules
from naranhi.data_parallel import DDP
from naranhi.distributed import Mesh
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel import (
    clip_grad_norm_,
    gpt2_plan,
    parallelize,
    sum_sequence_gradients,
    vocabulary_cross_entropy,
)
from naranhi.zero import Zero

SEEDS = 20
MAX_NORM = 0.1


@pytest.fixture(scope="module")
def world():
    """`world(ranks, function, *args)`: its results on a world of so many ranks."""
    with Ranks(8, 300.0) as pool:
        yield pool.call_in_a_world


def gpt2(seed, dropout=0.0):
    torch.manual_seed(seed)
    config = models.gpt2_config(vocabulary=19, positions=8, hidden=8, heads=2, blocks=1)
    return models.gpt2(config, tied=True, dropout=dropout)


def batch(seed, rows=8):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(19, (rows, 6), generator=generator)
    valid = torch.rand(tokens.shape, generator=generator) < 0.8
    return tokens, tokens.roll(-1, 1).masked_fill(~valid, models.IGNORE_INDEX)


def alone(layers, tokens, targets, microbatches=2):
    """One process's step."""
    for some, wanted in zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True):
        (models.loss(nn.Sequential(*layers)(some), wanted) / valid(targets)).backward()


def valid(targets):
    return int((targets != models.IGNORE_INDEX).sum())


def update_alone(layers, optimizer):
    params = nn.ModuleList(layers).parameters()
    nn.utils.clip_grad_norm_(nn.ModuleList(layers).parameters(), MAX_NORM)
    optimizer(params).step()


class Parallel:
    """A model on a mesh: `model`, `run(model)` and `update(model)`."""

    def __init__(self, kind, layers, mesh, sequence, optimizer, share, count):
        loss, (tokens, targets) = models.loss, share
        if mesh.sizes.tensor > 1:
            parallelize(layers, gpt2_plan(), mesh.tensor, sequence=sequence)
            loss = partial(vocabulary_cross_entropy, group=mesh.tensor)

        def backward(model, rows):
            (loss(model(tokens[rows]), targets[rows]) / count).backward()

        def run_wrapper(wrapper):
            with wrapper.no_sync():
                backward(wrapper.model, slice(0, 1))
            backward(wrapper.model, slice(1, None))

        def run_layers(layers):
            backward(nn.Sequential(*layers), slice(None))
            sum_sequence_gradients(layers)

        def run_pipeline(pipeline):
            pipeline.step(tokens, targets, count)
            sum_sequence_gradients(nn.ModuleList(pipeline.stages.values()))

        def step(model, params):
            optimizer(params).step()

        if kind == "layers":
            self.model, self.run = layers, run_layers
            self.clip = lambda model: clip_grad_norm_(nn.ModuleList(model), MAX_NORM)
            self.params = lambda model: nn.ModuleList(model).parameters()
        elif kind == "ddp":
            self.model, self.run = DDP(nn.Sequential(*layers), mesh.data), run_wrapper
            self.clip = lambda ddp: clip_grad_norm_(ddp.model, MAX_NORM)
            self.params = lambda ddp: ddp.model.parameters()
        elif kind.startswith("zero"):
            self.model = Zero(nn.Sequential(*layers), int(kind[-1]), group=mesh.data)
            self.run = run_wrapper
            self.clip = lambda zero: zero.clip_grad_norm_(MAX_NORM)
            step = lambda zero, params: zero.step(optimizer(params))  # noqa: E731
            self.params = lambda zero: zero.param_groups
        else:
            schedule = getattr(schedules, kind)(mesh.sizes.pipeline, 2)
            self.model = Pipeline(layers, schedule, loss, group=mesh.pipeline, replicas=mesh.data)
            self.run = run_pipeline
            self.clip = lambda pipeline: pipeline.clip_grad_norm_(MAX_NORM)
            self.params = lambda pipeline: pipeline.parameters()
        self.step = step

    def update(self, model):
        self.clip(model)
        self.step(model, self.params(model))

    def close(self):
        if hasattr(self.model, "close"):
            self.model.close()


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}


@cache
def traced(seed, dropout, optimizer):
    tokens, targets = batch(seed)
    return divergence.trace(
        gpt2(seed, dropout),
        partial(alone, tokens=tokens, targets=targets),
        update=partial(update_alone, optimizer=OPTIMIZERS[optimizer]),
    )


def compare(kind, sizes, seed, sequence=False, optimizer="sgd", dropout=0.0, damage=None):
    """The finder's report; `damage(parallel, layers)` breaks the parallel model first."""
    reference, optimizer = traced(seed, dropout, optimizer), OPTIMIZERS[optimizer]
    tokens, targets = batch(seed)
    layers = gpt2(seed, dropout)
    with Mesh(*sizes) as mesh:
        share = [x.chunk(sizes[0])[mesh.place.data] for x in (tokens, targets)]
        parallel = Parallel(kind, layers, mesh, sequence, optimizer, share, valid(targets))
        torch.manual_seed(100 * mesh.place.data + 10 * mesh.place.pipeline)
        if damage:
            damage(parallel, layers)
        try:
            return divergence.find(
                parallel.model, parallel.run, reference, mesh=mesh, update=parallel.update
            )
        finally:
            parallel.close()


def silent(kind, sizes, seeds, *options):
    """The words of the seeds that are not silent, the number of tensors, and the largest margin."""
    reports = [compare(kind, sizes, seed, *options) for seed in range(seeds)]
    loud = [str(report) for report in reports if report.divergence]
    return loud, reports[0].compared, max(report.margin for report in reports)


CORRECT = {
    "data": ("ddp", (2, 1, 1)),
    "ZeRO-1": ("zero1", (2, 1, 1)),
    "ZeRO-2": ("zero2", (2, 1, 1)),
    "ZeRO-3": ("zero3", (2, 1, 1)),
    "pipeline": ("one_f_one_b", (1, 2, 1)),
    "tensor": ("layers", (1, 1, 2)),
    "sequence": ("layers", (1, 1, 2), True),
    "data x tensor": ("zero3", (2, 1, 2)),
    "pipeline x tensor": ("one_f_one_b", (1, 2, 2)),
    "data x pipeline": ("gpipe", (2, 2, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", CORRECT)
def test_no_false_alarm_in_twenty_seeds(world, mesh):
    kind, sizes, *options = CORRECT[mesh]
    ranks = sizes[0] * sizes[1] * sizes[2]
    answers = world(ranks, silent, kind, sizes, SEEDS, *options)
    assert all(answer == answers[0] for answer in answers)  # the same report on every rank
    loud, compared, margin = answers[0]
    assert not loud, loud[0]
    assert compared > 100
    assert 0.01 < margin < 0.5  # far from an alarm, and not because nothing was compared


def test_adam_makes_whole_steps_of_rounding(world):
    (answer,) = {str(answer) for answer in world(2, silent, "zero3", (2, 1, 1), 5, False, "adamw")}
    assert answer.startswith("([], ")


def in_float64(kind, sizes, damage=None):
    """The reports of a model in float64."""
    global gpt2
    single = gpt2
    gpt2 = lambda *options: [layer.double() for layer in single(*options)]  # noqa: E731
    traced.cache_clear()
    try:
        return [compare(kind, sizes, seed, damage=damage) for seed in range(3)]
    finally:
        gpt2 = single
        traced.cache_clear()


@pytest.mark.parametrize("mesh", ["data", "ZeRO-3", "pipeline", "tensor"])
def test_a_model_in_float64_has_noise_too(world, mesh):
    for report in world(2, in_float64, *CORRECT[mesh][:2])[0]:
        assert not report.divergence, report
        assert report.margin < 0.5


def nudge_by_little(parallel, layers):
    """One weight of the second tensor rank is off by what float32 would not show."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            layers[1].block.mlp.c_fc.weight[0, 0] += 1e-11


def test_a_model_in_float64_is_held_to_its_precision(world):
    for report in world(2, in_float64, "layers", (1, 1, 2), nudge_by_little)[0]:
        assert report.divergence.layer == "1.block.mlp.c_fc"


def test_eight_ranks(world):
    answers = world(8, silent, "one_f_one_b", (2, 2, 2), 1, True)
    assert answers[0][:2] == ([], 516)


# --- what is wrong is found -----------------------------------------------------------------------


def layer_of(parallel, name):
    return divergence.finder.layers_of(parallel.model).get(name)


def nudge_shard(parallel, layers):
    """One weight of the second tensor rank is off by a hundred-thousandth."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            layers[1].block.mlp.c_fc.weight[0, 0] += 1e-5


def nudge_stage(parallel, layers):
    """A bias of the second stage is off."""
    head = layer_of(parallel, "2.ln_f")
    if head is not None:
        with torch.no_grad():
            head.bias[0] += 1e-4


def nudge_microbatch(parallel, layers):
    """What the second data rank's norm returns is off, in its second micro-batch."""
    calls = []

    def hook(module, args, output):
        calls.append(output)
        return output + 1e-4 if dist.get_rank() == 1 and len(calls) == 2 else None

    layer_of(parallel, "1.block.ln_2").register_forward_hook(hook)


def cut_graph(parallel, layers):
    """No gradient gets behind the MLP's first layer."""
    hook = lambda module, args, output: output.detach()  # noqa: E731
    layer_of(parallel, "1.block.mlp.c_fc").register_forward_hook(hook)


def lose_gradient(parallel, layers):
    """After the reduction, the second data rank forgets a gradient."""
    run = parallel.run

    def forget(model):
        run(model)
        if dist.get_rank() == 1:
            layer_of(parallel, "2.ln_f").weight.grad = None

    parallel.run = forget


def half_batch(parallel, layers):
    """All ranks leave out their last row."""
    step = parallel.model.step
    parallel.model.step = lambda inputs, targets, count: step(inputs[:2], targets[:2], count)


def decay_on_one_rank(parallel, layers):
    """The second rank's weights decay."""
    step = parallel.update

    def update(model):
        step(model)
        if dist.get_rank() == 1:
            with torch.no_grad():
                layer_of(parallel, "2.ln_f").weight.mul_(0.999)

    parallel.update = update


def noisy_norm(parallel, layers):
    """With dropout, the second tensor rank's norm parts from the first's."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            layer_of(parallel, "1.block.ln_2").bias[0] += 1e-4


def other_seed(parallel, layers):
    """Dropout draws other masks on the second tensor rank."""
    torch.manual_seed(dist.get_rank())


DAMAGED = {
    nudge_shard: (
        ("layers", (1, 1, 2)),
        ("forward", "1.block.mlp.c_fc", 0, (1,), "tensor"),
        "rank 1 (tensor 1) differs from one process",
    ),
    nudge_stage: (
        ("one_f_one_b", (1, 2, 1)),
        ("forward", "2.ln_f", 0, (1,), None),
        "rank 1 (pipeline 1) differs from one process",
    ),
    nudge_microbatch: (
        ("ddp", (2, 1, 1)),
        ("forward", "1.block.ln_2", 1, (1,), "data"),
        "rank 1 (data 1) differs from one process",
    ),
    cut_graph: (
        ("zero3", (2, 1, 1)),
        ("backward", "1.block.mlp.act", 0, (0, 1), None),
        "all ranks differ from one process",
    ),
    lose_gradient: (
        ("ddp", (2, 1, 1)),
        ("gradient", "2.ln_f.weight", 0, (1,), "data"),
        "the data ranks 0 and 1 differ among themselves, and must agree: 0 has it right",
    ),
    half_batch: (
        ("gpipe", (2, 1, 1)),
        ("data", "0", 0, (0, 1), "data"),
        "4 of 8 rows are taken by nobody, the first is 2",
    ),
    decay_on_one_rank: (
        ("ddp", (2, 1, 1)),
        ("weights", "2.ln_f.weight", 0, (1,), "data"),
        "the data ranks 0 and 1 differ among themselves, and must agree: 0 has it right",
    ),
    noisy_norm: (
        ("layers", (1, 1, 2)),
        ("forward", "1.block.ln_2", 0, (0, 1), "tensor"),
        "the tensor ranks 0 and 1 differ among themselves, and must agree",
    ),
    other_seed: (
        ("layers", (1, 1, 2)),
        ("mask", "0.drop", 0, (0, 1), "tensor"),
        "the tensor ranks 0, 1 draw different masks, and must agree",
    ),
}


def damaged(names):
    """The finder's reports of a model that is damaged."""
    answers = {}
    for damage in DAMAGED:
        if damage.__name__ in names:
            kind, sizes = DAMAGED[damage][0]
            dropout = 0.2 if damage in (noisy_norm, other_seed) else 0.0
            report = compare(kind, sizes, 0, dropout=dropout, damage=damage)
            answers[damage.__name__] = report.divergence
    return answers


def test_what_is_wrong_is_found(world):
    names = [damage.__name__ for damage in DAMAGED]
    answers = world(2, damaged, names)
    assert answers[0] == answers[1]
    for damage, (_, place, what) in DAMAGED.items():
        found = answers[0][damage.__name__]
        assert (found.phase, found.layer, found.microbatch, found.ranks, found.axis) == place
        assert found.what == what


def noisy_beside_other_rows():
    report = compare("ddp", (2, 1, 2), 0, dropout=0.2, damage=noisy_norm)
    return report.divergence, str(report)


def test_with_dropout_only_ranks_that_hold_the_same_are_compared(world):
    """The other two ranks have other rows of the batch, as far from these as rows are."""
    for found, words in world(4, noisy_beside_other_rows):
        assert (found.phase, found.layer) == ("forward", "1.block.ln_2")
        assert found.ranks == (0, 1) and found.axis == "tensor"
        assert found.error == pytest.approx(1e-4, rel=0.05) and 0 < found.allowed < 1e-5
        assert f"off by {found.error:.1e}, allowed {found.allowed:.1e}" in words


# --- random masks ---------------------------------------------------------------------------------


def silent_with_dropout(kind, sizes, sequence, seeds):
    reports = [compare(kind, sizes, seed, sequence, dropout=0.2) for seed in range(seeds)]
    return [str(report) for report in reports]


@pytest.mark.parametrize(
    "kind, sizes, sequence",
    [("layers", (1, 1, 2), False), ("layers", (1, 1, 2), True), ("zero3", (2, 1, 1), False)],
)
def test_dropout_raises_no_alarm(world, kind, sizes, sequence):
    for report in world(2, silent_with_dropout, kind, sizes, sequence, 5)[0]:
        assert report.startswith("no divergence: ")


# --- bad input ------------------------------------------------------------------------------------


def raised(function, *args, **options):
    with pytest.raises((ValueError, RuntimeError)) as error:
        function(*args, **options)
    return f"{type(error.value).__name__}: {error.value}"


def refusals():
    """The words of every refusal on this rank."""
    mesh, said = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), {}
    run, reference = partial(alone, tokens=batch(0)[0], targets=batch(0)[1]), traced(0, 0.0, "sgd")
    reference = divergence.trace(gpt2(0), run)
    find = partial(divergence.find, reference=reference, mesh=mesh)
    deep = [*gpt2(0), nn.Linear(2, 2)]
    said["more layers"] = raised(find, deep, run)
    said["fewer layers"] = raised(find, gpt2(0)[:2], run)
    said["update"] = raised(find, gpt2(0), run, update=lambda model: None)
    said["no step"] = raised(find, gpt2(0), lambda model: None)
    said["other reference"] = raised(
        divergence.find, gpt2(0), run, _other_rows(dist.get_rank()), mesh=mesh
    )
    unnamed = init_device_mesh("cpu", (2,))
    said["no names"] = raised(divergence.find, gpt2(0), run, reference, mesh=unnamed)
    short = lambda layers: alone(layers, batch(0)[0][:, :5], batch(0)[1][:, :5])  # noqa: E731
    said["shape"] = raised(find, gpt2(0), short)
    twice = partial(divergence.find, Twice(), lambda model: model(torch.ones(2, 2)))
    reference = divergence.trace(Twice(), lambda model: model(torch.ones(2, 2), torch.ones(2, 2)))
    said["fewer tensors"] = raised(twice, reference, mesh=mesh)
    one_rank_only = partial(_stop_on_rank_1, run)
    said["one rank"] = raised(find, gpt2(0), one_rank_only)
    return said


class Twice(nn.Module):
    def forward(self, *tensors):
        return sum(tensors)


def _other_rows(seed):
    tokens, targets = batch(seed)
    return divergence.trace(gpt2(0), partial(alone, tokens=tokens, targets=targets))


def _stop_on_rank_1(run, layers):
    if dist.get_rank() == 0:
        run(layers)


def test_bad_input_is_refused_on_every_rank(world):
    first, second = world(2, refusals)
    assert first == second
    for what, words in REFUSED.items():
        assert first[what] == words


REFUSED = {
    "more layers": "ValueError: rank 0 has a parameter 3.bias, and the model of one process has "
    "none of this name: trace the unsplit model, whose layers have the same names",
    "fewer layers": "ValueError: no rank has the parameter 2.lm_head.weight, which the model of "
    "one process has: trace the same model",
    "update": "RuntimeError: find was given an update, and trace was not: give it to both",
    "no step": "RuntimeError: run(model) has called no layer of the model: it should run a step",
    "one rank": "RuntimeError: on rank 1: run(model) has called no layer of the model: it should "
    "run a step",
    "other reference": "ValueError: rank 0 and rank 1 have different values of the batch",
    "fewer tensors": "ValueError: the model takes fewer tensors here than in one process; pass the "
    "same ones",
    "no names": "ValueError: the finder needs a mesh of all 2 ranks whose axes have names "
    "(mesh_dim_names), not one of 2 ranks with the axes None",
    "shape": "ValueError: dimension 1 has 5 elements here and 6 in one process: no split over "
    "one of the axes {'data': 2} explains that",
}
