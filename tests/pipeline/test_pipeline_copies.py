"""Copies: what is sent must not change on its way, what is on several ranks is kept the same, and
what nobody has any more is freed."""

import gc
import os
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import Ranks, first_ranks
from plain_loop import squared_error
from replicas import grid
from torch import nn

from naranhi import models, pipeline, schedules
from naranhi.distributed import fingerprint
from naranhi.tensor_parallel import materialize

WIDTH = 8

# --- what a stage keeps and hands on -------------------------------------------------------------


class Mean(nn.Module):
    """Hands on its buffer, which it changes in place."""

    def __init__(self, where):
        super().__init__()
        self.linear, self.where = nn.Linear(WIDTH, WIDTH), where
        if where == "buffer":
            self.register_buffer("mean", torch.zeros(WIDTH))
        elif where == "parameter":
            self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        elif where == "attribute":
            self.mean = torch.zeros(WIDTH)
        else:
            self.means = {"all": [torch.zeros(1, WIDTH)]}

    def forward(self, x):
        mean = self.means["all"][0][0] if self.where == "list" else self.mean
        mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return self.linear(x), mean


class Slow(nn.Module):
    """Takes its time, while the stage before goes on."""

    def forward(self, value):
        time.sleep(0.02)
        x, mean = value
        return x - mean


def handed_on(where):
    """On a rank: the loss of the pipeline, and that of one process."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, 36, WIDTH)
    expected, layers = ([models_of(where), Slow()] for _ in range(2))
    found = pipeline.run(
        schedules.gpipe(2, 12), layers, squared_error, inputs, targets, 36, group=group
    )
    total = 0
    for x, y in zip(inputs.chunk(12), targets.chunk(12), strict=True):
        total = total + squared_error(nn.Sequential(*expected)(x), y) / 36
    return None if found is None else (found.item(), total.item())


def models_of(where):
    torch.manual_seed(1)
    return Mean(where)


@pytest.mark.parametrize("where", ["buffer", "parameter", "attribute", "list"])
def test_what_a_stage_changes_in_place_is_sent_as_it_was(five, where):
    found, expected = five.call(handed_on, where)[1]
    assert found == expected


class TwoNames(nn.Module):
    """One parameter under two names."""

    def __init__(self):
        super().__init__()
        self.v = self.w = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        return x @ self.w + 0.1 * x @ self.v


def two_names(ranks, each, updates, age):
    """On a rank: how far its weights are from those of a loop with the schedule's delay, in which
    stage s reads weights that are age[s] updates old."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return pipeline.join_group_creation()
    generator = torch.Generator().manual_seed(4)
    inputs, targets = torch.randn(2, 2 * each * updates, WIDTH, generator=generator)
    made = (
        schedules.pipedream(ranks, updates)
        if each == 1
        else schedules.pipedream_2bw(ranks, each, updates)
    )
    with pipeline.Pipeline(
        [TwoNames() for _ in range(ranks)],
        made,
        squared_error,
        group=group,
        optimizer=lambda some: torch.optim.SGD(some, lr=0.01),
    ) as pipe:
        pipe.step(inputs, targets, 4 * each)
        (found,) = pipe.parameters()
    versions, sums = [[torch.eye(WIDTH)] for _ in age], [0] * ranks
    for k, (x, y) in enumerate(zip(inputs.split(2), targets.split(2), strict=True)):
        read = [
            made[max(0, k // each - old)].clone().requires_grad_()
            for made, old in zip(versions, age, strict=True)
        ]
        for weight in read:
            x = x @ weight + 0.1 * x @ weight
        gradients = torch.autograd.grad(squared_error(x, y) / (4 * each), read)
        sums = [one + other for one, other in zip(sums, gradients, strict=True)]
        if (k + 1) % each == 0:
            for stage, gradient in zip(versions, sums, strict=True):
                stage.append(stage[-1] - 0.01 * gradient)
            sums = [0] * ranks
    return (found - versions[rank][-1]).abs().max().item()


@pytest.mark.parametrize(
    "ranks, each, updates, age", [(3, 1, 8, (2, 1, 0)), (2, 2, 4, (1, 1))], ids=["pipedream", "2bw"]
)
def test_one_parameter_under_two_names_has_versions(five, ranks, each, updates, age):
    assert all(gap < 1e-6 for gap in five.call(two_names, ranks, each, updates, age)[:ranks])


# --- copies on several ranks ---------------------------------------------------------------------


class Product(nn.Module):
    """Multiplies by a matrix, or by its conjugate, whose gradient is a conjugated view."""

    def __init__(self, matrix, conjugated):
        super().__init__()
        self.matrix, self.conjugated = matrix, conjugated

    def forward(self, x):
        return x @ (self.matrix.mH if self.conjugated else self.matrix)


def tied_complex(conjugated):
    """On a rank: how far the gradient of a tied matrix is from one process's."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    x, matrix = torch.randn(2, 4, 4, dtype=torch.complex128)
    given = nn.Parameter(matrix.clone()), nn.Parameter(matrix.clone())
    alone, layers = ([Product(one, flag) for flag in conjugated] for one in given)
    squared_error(alone[1](alone[0](x)).abs(), 0.0).backward()
    loss_of = lambda output, _: squared_error(output.abs(), 0.0)  # noqa: E731
    with pipeline.Pipeline(layers, schedules.gpipe(2, 2), loss_of, group=group) as pipe:
        pipe.step(x, x, 1)
        dist.barrier(group)
    return (given[1].grad - given[0].grad).abs().max().item()


@pytest.mark.parametrize("conjugated", [(False, True), (True, True)])
def test_a_tied_matrix_may_be_conjugated(five, conjugated):
    assert max(five.call(tied_complex, conjugated)[:2]) < 1e-12


def tied_strides():
    """On a rank: how far a tied gradient is from one process's, if each rank has it in an order."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    x, matrix = torch.randn(2, 4, 4, dtype=torch.float64)
    given = nn.Parameter(matrix.clone()), nn.Parameter(matrix.clone())
    alone, layers = ([Product(one, False) for _ in range(2)] for one in given)
    squared_error(alone[1](alone[0](x)), 0.0).backward()
    if rank:
        given[1].register_post_accumulate_grad_hook(transpose_gradient)
    loss_of = lambda output, _: squared_error(output, 0.0)  # noqa: E731
    with pipeline.Pipeline(layers, schedules.gpipe(2, 2), loss_of, group=group) as pipe:
        pipe.step(x, x, 1)
        dist.barrier(group)
    return (given[1].grad - given[0].grad).abs().max().item()


def transpose_gradient(parameter):
    parameter.grad = parameter.grad.t().contiguous().t()


def test_tied_gradients_are_summed_whatever_their_strides(five):
    assert max(five.call(tied_strides)[:2]) < 1e-12


class Gated(nn.Linear):
    """Uses a matrix beside its weight only if told to; the matrix has a gradient of -0.0."""

    def __init__(self, matrix):
        super().__init__(WIDTH, WIDTH)
        self.matrix, self.is_used = matrix, False

    def forward(self, x):
        return super().forward(x) + (x @ self.matrix if self.is_used else 0.0)


def tied_unused():
    """On a rank: the gradient of a tied matrix after steps without it, with it, and without it."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    matrix, grads = nn.Parameter(torch.zeros(WIDTH, WIDTH)), []
    matrix.register_hook(lambda grad: torch.full_like(grad, -0.0))
    layers, x = [Gated(matrix) for _ in range(2)], torch.ones(2, WIDTH)
    with pipeline.Pipeline(layers, schedules.gpipe(2, 2), squared_error, group=group) as pipe:
        for is_used in False, True, False:
            layers[1].is_used = is_used
            pipe.step(x, x, 1)
            grads.append(None if matrix.grad is None else matrix.grad.abs().sum().item())
        dist.barrier(group)
    return grads


def test_a_tied_gradient_stays_none_where_no_stage_has_one(five):
    assert five.call(tied_unused)[:2] == [[None, 0.0, 0.0]] * 2


def loaded(assign):
    """On a rank: the error of a step after rank 1 has loaded weights, None without one."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    x = torch.randn(4, WIDTH)
    with pipeline.Pipeline(layers, schedules.gpipe(2, 2), squared_error, group=group) as pipe:
        values = {name: value.clone() for name, value in layers[1].state_dict().items()}
        layers[1].load_state_dict(values, assign=assign and rank == 1)
        try:
            pipe.step(x, x, 1)
        except RuntimeError as error:
            return str(error)
        finally:
            dist.barrier(group)
    return None


def test_a_replaced_parameter_is_refused_on_every_rank(five):
    assert five.call(loaded, False)[:2] == [None, None]
    for told in five.call(loaded, True)[:2]:
        assert told.startswith(
            "rank 1 of the pipeline: weight of layer 1 (Linear) was replaced since the Pipeline "
            "was made"
        )


def no_seed(what):
    """On a rank: the error where ranks have made their layers differently."""
    rank = dist.get_rank()
    if rank >= 4:
        first_ranks(4)
        try:
            return pipeline.join_group_creation()
        except ValueError as error:
            return str(error)
    group = first_ranks(4)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    layers[3] = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    layers[3][1].weight = layers[0].weight
    layers[1].register_buffer("table", torch.ones(3))
    layers[3].add_module("table", layers[1])
    with torch.no_grad():
        if what == "tied" and rank == 3:
            layers[0].weight[0, 0] += 1e-6
        elif what == "a stage's own":
            layers[2].weight[0, 0] += rank
        elif what == "buffers" and rank == 1:
            layers[1].table[2] = 2.0
    try:
        with pipeline.Pipeline(layers, schedules.gpipe(4, 2), squared_error, group=group):
            return None
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "what, words",
    [
        (
            "tied",
            "rank 0 and rank 3, of one pipeline, have different values of 0.weight: give both the "
            "same, by one seed or one checkpoint",
        ),
        ("buffers", "rank 1 and rank 3, of one pipeline, have different values of 1.table"),
    ],
)
def test_tied_copies_that_differ_are_refused_on_every_rank(five, what, words):
    for told in five.call(no_seed, what):
        assert told.startswith(words)


def test_layers_of_other_stages_may_differ(five):
    assert five.call(no_seed, "a stage's own") == [None] * 5


def without_values(own):
    """On a rank of two: is the loss right where only layers of `own[rank]` have values, or the
    error."""
    group, rank = first_ranks(2), dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    layers[3].weight = layers[0].weight  # tied
    with torch.device("meta"):
        empty = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    empty[3].weight = empty[0].weight
    materialize(
        empty,
        {
            f"{number}.{name}": tensor
            for number in (own[rank] if rank < 2 else ())
            for name, tensor in layers[number].state_dict().items()
        },
    )
    inputs, targets = torch.randn(2, 8, WIDTH)
    try:
        if rank >= 2:
            return pipeline.join_group_creation()
        with pipeline.Pipeline(empty, schedules.gpipe(2, 2), squared_error, group=group) as pipe:
            found = pipe.step(inputs, targets, 8)
    except ValueError as error:
        return str(error)
    expected = squared_error(nn.Sequential(*layers)(inputs), targets) / 8
    return found is None or abs(found - expected).item() < 1e-6


def test_layers_of_other_ranks_need_no_values(five):
    assert five.call(without_values, [[0, 1], [2, 3]])[:2] == [True, True]


def test_layers_of_a_rank_need_values(five):
    for told in five.call(without_values, [[0, 1], [3]]):
        assert "layer 2 (Linear): weight is on the meta device and has no values" in told


def replicas(what):
    """On a rank of 2 x 2: the error, or the fingerprint of its stage after two steps."""
    along, across = grid()
    place = dist.get_rank() % 2  # which of the two pipelines
    torch.manual_seed(place if what == "parameters" else 0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)]
    if what == "buffers":
        layers[1][1].running_var[3] += place
    torch.manual_seed(7)
    inputs, targets = (one.chunk(2)[place] for one in torch.randn(2, 16, WIDTH))
    try:
        with pipeline.Pipeline(
            layers, schedules.gpipe(2, 2), squared_error, group=along, replicas=across
        ) as pipe:
            for _ in range(2):
                pipe.step(inputs, targets, 16)
                for one in pipe.parameters():
                    one.grad = None
                with torch.no_grad():  # a step for its loss changes batch norms too
                    pipe.step(inputs, targets, 16)
            return fingerprint(nn.ModuleList(pipe.stages.values()))
    except ValueError as error:
        return str(error)


@pytest.fixture(scope="module")
def four():
    with Ranks(4, deadline=40.0) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "what, words",
    [
        (
            "parameters",
            "rank 0 and rank 1, replicas of one another, have different values of "
            "0.0.weight: give both the same, by one seed or one checkpoint",
        ),
        (
            "buffers",
            "rank 2 and rank 3, replicas of one another, have different values of 1.1.running_var",
        ),
    ],
)
def test_replicas_that_differ_are_refused_on_every_rank(four, what, words):
    for told in four.call(replicas, what):
        assert told.startswith(words)


def test_replicas_stay_equal_with_their_buffers(four):
    found = four.call(replicas, None)
    assert found[0] == found[1] != found[2] == found[3]


# --- what nobody has any more --------------------------------------------------------------------


def left_over(pipelines, tied):
    """On a rank: how many descriptors, threads, groups and weights pipelines leave that are let go
    of without close()."""
    group, rank = first_ranks(2), dist.get_rank()
    known = []

    def once():
        if rank >= 2:
            return pipeline.join_group_creation()
        torch.manual_seed(0)
        layers = models.mlp(4, WIDTH)
        if tied:
            layers[3].up = layers[0].up
        inputs, targets = torch.randn(2, 8, WIDTH)
        pipe = pipeline.Pipeline(layers, schedules.one_f_one_b(2, 4), squared_error, group=group)
        pipe.step(inputs, targets, 8)
        known.append(weakref.ref(layers[2 * rank].down.weight))
        dist.barrier(group)  # nobody lets go while another rank is in the step
        return None

    def count():
        gc.collect()
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(dist.distributed_c10d._world.pg_map),
            sum(one() is not None for one in known),
        )

    once()
    before = count()
    for _ in range(pipelines):
        once()
    return [now - then for now, then in zip(count(), before, strict=True)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_that_is_let_go_of_leaves_nothing(five, tied):
    assert five.call(left_over, 4, tied) == [[0, 0, 0, 0]] * 5


def after_all_groups():
    """On a rank: a Pipeline that is let go of when its groups have gone with all others."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        pipeline.join_group_creation()
    else:
        pipe = pipeline.Pipeline(
            models.mlp(2, WIDTH), schedules.gpipe(2, 2), squared_error, group=group
        )
    dist.barrier()
    dist.destroy_process_group()
    if rank < 2:
        pipe.close()
    return dist.is_initialized()


def test_groups_that_are_gone_are_not_missed():
    with Ranks(2, deadline=40.0) as ranks:
        assert ranks.call(after_all_groups) == [False, False]


def fails(rank_that_fails):
    """On a rank: its error, kept with all that it refers to, and after how many seconds it came."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    layers = models.mlp(2, WIDTH)
    x = torch.ones(4, WIDTH)

    def hook(gradient):
        raise ArithmeticError("a hook fails")

    start = None
    try:
        with pipeline.Pipeline(
            layers, schedules.gpipe(2, 2), squared_error, group=group, timeout=20.0
        ) as pipe:
            pipe.step(x, x, 4)
            if rank == rank_that_fails:
                layers[rank].up.weight.register_hook(hook)
            start = time.monotonic()
            pipe.step(x, x, 4)
    except Exception as error:
        kept.append(error)  # as a notebook does
        return type(error).__name__, time.monotonic() - start
    return None


kept = []


def test_a_failure_is_heard_of_though_its_error_is_kept(five):
    failed, other = five.call(fails, 1)[1::-1]
    assert failed[0] == "ArithmeticError"
    assert other[0] == "RuntimeError" and other[1] < 10.0
