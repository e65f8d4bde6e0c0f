"""Meshes of ranks, and what is trained on them; a mesh of data D, pipeline P, tensor T is DxPxT."""

import math
import shlex
from contextlib import contextmanager
from functools import partial

import pytest
import small_gpt2
import torch
import torch.distributed as dist
from replicas import make, one_process, squared_error
from torch import nn

from naranhi import models, schedules, train
from naranhi.data_parallel import all_reduce_bucketed
from naranhi.distributed import Mesh, agree, fingerprint
from naranhi.distributed.mesh import Place
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel import VocabularyParallelEmbedding, VocabularyParallelHead
from naranhi.train import Training, UsageError, trainer

# --- the mesh ------------------------------------------------------------------------------------


def places(sizes):
    """On a rank: its place, the ranks of its groups, its rank in each; the ranks of replicas."""
    with Mesh(*sizes) as mesh:
        groups = [getattr(mesh, axis) for axis in Place._fields]
        ranks = [dist.get_process_group_ranks(group) for group in groups]
        copies = map(dist.get_process_group_ranks, (mesh.replicas, mesh.expert_replicas))
        return mesh.place, ranks, tuple(map(dist.get_rank, groups)), [*copies]


def closed_late():
    mesh = Mesh(data=2, tensor=2)
    mesh.close()
    mesh.close()
    with Mesh(data=2, tensor=2), Mesh(data=4):
        dist.destroy_process_group()
    return True


def test_a_mesh_that_is_closed_twice_or_after_the_default_group(eight):
    assert eight(4, closed_late) == [True] * 4


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
        (3, 1, 2),
        (2, 2, 2),
        (1, 4, 2),
        (1, 8, 1),
        (1, 1, 1, 2, 2),
        (2, 1, 1, 2, 2),
        (1, 2, 2, 1, 2),
        (1, 1, 2, 2, 2),
        (2, 2, 1, 2, 1),
    ],
)
def test_a_rank_has_a_place_and_a_group_on_each_axis(eight, sizes):
    sizes = Place(*sizes)
    found = eight(math.prod(sizes), places, sizes)
    number = {}
    for rank, (place, *_) in enumerate(found):
        share = place.pipeline * sizes.data + place.data
        part = (share * sizes.expert + place.expert) * sizes.context + place.context
        assert rank == part * sizes.tensor + place.tensor
        number[place] = rank
    for place, groups, here, copies in found:
        assert here == place
        for axis, group, size in zip(Place._fields, groups, sizes, strict=True):
            assert group == [number[place._replace(**{axis: i})] for i in range(size)]
        for group, apart in zip(copies, ("tensor", "expert"), strict=True):
            assert group == [
                rank
                for other, rank in number.items()
                if other.pipeline == place.pipeline
                and getattr(other, apart) == getattr(place, apart)
            ]


def refused(by_rank):
    """On a rank: the error, and how many groups were made in spite of it."""
    before = len(dist.distributed_c10d._world.pg_map)
    try:
        Mesh(*by_rank[dist.get_rank()])
    except ValueError as error:
        return str(error), len(dist.distributed_c10d._world.pg_map) - before
    return None


@pytest.mark.parametrize(
    "by_rank, message",
    [
        ([(2, 2, 1)] * 2, "a mesh of data 2 x pipeline 2 x tensor 1 has 4 ranks, the world has 2"),
        ([(1, 1, 1)] * 2, "a mesh of data 1 x pipeline 1 x tensor 1 has 1 ranks, the world has 2"),
        ([(1, -1, -2)] * 2, "pipeline must be a whole number of at least 1, not -1"),
        ([(1, 1, 2.0)] * 2, "tensor must be a whole number of at least 1, not 2.0"),
        (
            [(1, 1, 2), (2, 1, 1)],
            "size of the mesh: data 1 x pipeline 1 x tensor 2 on rank 0, "
            "data 2 x pipeline 1 x tensor 1 on rank 1",
        ),
        (
            [(2, 1, 1, 1), (2, 1, 1, 1.0)],
            "sizes: Place(data=2, pipeline=1, tensor=1, context=1, expert=1) on rank 0, "
            "Place(data=2, pipeline=1, tensor=1, context=1.0, expert=1) on rank 1",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_any_group_is_made(eight, by_rank, message):
    assert eight(2, refused, by_rank) == [(message, 0)] * 2


# --- what has to be the same ---------------------------------------------------------------------


def compared(by_rank):
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    try:
        agree(group, **by_rank[dist.get_rank() - 1])
    except ValueError as error:
        return str(error)
    return "the same"


def test_what_differs_is_named_with_two_ranks_of_the_world(eight):
    x = torch.arange(6.0)
    for one, other, message in [
        ({"a_number": 1}, {"a_number": 1}, "the same"),
        ({"a_number": 1}, {"a_number": 2}, "a number: 1 on rank 1, 2 on rank 2"),
        ({"a": 1}, {"a": 1, "b": 3}, "b: None on rank 1, 3 on rank 2"),
        ({"inputs": x}, {"inputs": x.clone()}, "the same"),
        ({"inputs": x}, {"inputs": x.flip(0)}, "rank 1 and rank 2 have different inputs"),
    ]:
        assert eight(3, compared, [one, other]) == [None, message, message]


def test_a_fingerprint_is_that_of_every_bit_name_shape_and_dtype():
    torch.manual_seed(0)
    linear, x = nn.Linear(3, 2), torch.zeros(2, 3)
    print_of_linear = fingerprint(linear)
    assert fingerprint(linear) == print_of_linear
    different = [x, -x, x.T, x.half(), x.bfloat16(), nn.Linear(3, 2), nn.Sequential(linear)]
    assert len({print_of_linear, *map(fingerprint, different)}) == 8
    assert fingerprint(x.T) == fingerprint(x.T.contiguous())


# --- pipelines side by side ----------------------------------------------------------------------


SCHEDULES = {
    "gpipe": schedules.gpipe,
    "one_f_one_b": schedules.one_f_one_b,
    "interleaved": lambda stages, m: schedules.interleaved(stages, m, 2),
}


def side_by_side(sizes, name, work):
    """On a rank: whether every gradient is that of one process to the bit."""
    layers, loss, inputs, targets, count = make(work)
    with Mesh(*sizes) as mesh:
        mine = mesh.place.data
        share = [one.chunk(mesh.sizes.data)[mine] for one in (inputs, targets)]
        schedule = SCHEDULES[name](mesh.sizes.pipeline, 4)
        with Pipeline(layers, schedule, loss, group=mesh.pipeline, replicas=mesh.data) as pipe:
            for _ in range(2):
                for one in pipe.parameters():
                    one.grad = None
                pipe.step(*share, count)
            expected = one_process(work, mesh.sizes.data, 4)
            return all(
                torch.equal(one.grad, other)
                for stage in pipe.stages.values()
                for number, layer in enumerate(stage.layers, stage.first)
                for one, other in zip(layer.parameters(), expected[number], strict=True)
            )


@pytest.mark.parametrize(
    "sizes, name",
    [
        ((2, 1, 1), "gpipe"),
        ((2, 2, 1), "one_f_one_b"),
        ((2, 2, 1), "interleaved"),
        ((2, 4, 1), "gpipe"),
    ],
)
def test_gradients_are_sums_over_pipelines_to_the_bit(eight, sizes, name):
    ranks = sizes[0] * sizes[1]
    for work in ("mlp", "gpt2"):
        assert eight(ranks, side_by_side, sizes, name, work) == [True] * ranks, work


def copies(first):
    """On a rank with a copy of the tied embedding: the fingerprint of its gradient; else None.

    first: what is summed up first, "data" (as it should be) or "tied".
    """
    layers, loss, inputs, targets, count = make("tied gpt2")
    with Mesh(data=4, pipeline=2) as mesh:
        share = [one.chunk(4)[mesh.place.data] for one in (inputs, targets)]
        tied = {id(layers[0].wte.weight), id(layers[-1].lm_head.weight)}
        replicas = mesh.data if first == "data" else None
        with Pipeline(
            layers, schedules.gpipe(2, 2), loss, group=mesh.pipeline, replicas=replicas
        ) as pipe:
            pipe.step(*share, count)
            if first == "tied":
                all_reduce_bucketed(nn.ModuleList(pipe.stages.values()), mesh.data)
            (mine,) = [one.grad for one in pipe.parameters() if id(one) in tied]
    return fingerprint(mine)


def test_copies_of_a_tied_embedding_are_equal_to_the_bit_on_four_replicas(eight):
    """Four numbers have several sums: in which order they are added depends on where they stand in
    a bucket, and that is another place on each stage. Two numbers have one."""
    assert len(set(eight(8, copies, "data"))) == 1
    assert len(set(eight(8, copies, "tied"))) == 2, "or the order would not matter"


def failure(case):
    """On a rank: the error."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers, x = models.mlp(4, 8), torch.zeros(4, 8)
    with Mesh(data=2, pipeline=2) as mesh:
        replicas, balance, options = mesh.data, [2, 2], {}
        schedule = schedules.gpipe(2, 2 if case != "micro-batches" or rank in (0, 2) else 4)
        if case == "balance":
            balance = [3, 1] if mesh.place.data else [2, 2]
        elif case == "updates":
            schedule = schedules.pipedream(2, 2)
            options = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.1)}
        elif case == "one stage":
            replicas = mesh.data if mesh.place.pipeline else None
        try:
            with Pipeline(
                layers,
                schedule,
                squared_error,
                balance=balance,
                group=mesh.pipeline,
                replicas=replicas,
                **options,
            ) as pipe:
                for _ in range(2):
                    pipe.step(x, x, 1)
                    dist.barrier()  # nobody closes a channel that another still needs
        except (ValueError, RuntimeError) as error:
            dist.barrier()
            return str(error)
    return None


@pytest.mark.parametrize(
    "case, words",
    [
        (
            "micro-batches",
            "rank 0 and rank 1, replicas of one another, disagree on micro-batches: 2 and 4",
        ),
        (
            "balance",
            "rank 0 and rank 1, replicas of one another, disagree on balance: [2, 2] and [3, 1]",
        ),
        ("updates", "0U1 cannot be run: the gradients of replicas are added up at a step's end"),
        (
            "one stage",
            "rank 0 and rank 2, of one pipeline, disagree on number of replicas: None and 2",
        ),
        ("second step", "a parameter still has a gradient of an earlier step"),
    ],
)
def test_pipelines_that_do_not_fit_together_are_refused_on_every_rank(eight, case, words):
    for told in eight(4, failure, case):
        assert words in told


@contextmanager
def two_by_two():
    """On a rank: its pipeline of two, which has a replica, and a batch."""
    torch.manual_seed(0)
    layers, batch = models.mlp(4, 8), torch.randn(2, 4, 8)
    with (
        Mesh(data=2, pipeline=2) as mesh,
        Pipeline(
            layers,
            schedules.one_f_one_b(2, 2),
            squared_error,
            group=mesh.pipeline,
            replicas=mesh.data,
        ) as pipe,
    ):
        yield pipe, *batch


def tried_again():
    """On a rank: whether a step that was refused for its gradients can be done after all."""
    with two_by_two() as (pipe, x, y):
        found = []
        for _ in range(2):
            for one in pipe.parameters():
                one.grad = None
            pipe.step(x, y, 1)
            found.append([one.grad for one in pipe.parameters()])
            with pytest.raises(RuntimeError, match="call zero_grad"):
                pipe.step(x, y, 1)
        return all(map(torch.equal, *found))


def test_a_step_that_was_refused_for_its_gradients_leaves_nothing_behind(eight):
    assert eight(4, tried_again) == [True] * 4


def evaluated_before_the_update():
    """On a rank: whether a step without gradients leaves those of the step before as they are."""
    with two_by_two() as (pipe, x, y):
        pipe.step(x, y, 1)
        before = [param.grad.clone() for param in pipe.parameters()]
        with torch.no_grad():
            pipe.step(x, y, 1)
        after = [param.grad for param in pipe.parameters()]
        return all(map(torch.equal, before, after))


def test_a_step_without_gradients_sums_none(eight):
    assert eight(4, evaluated_before_the_update) == [True] * 4


# --- training ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_gpt2.write(tmp_path_factory.mktemp("small"))


def losses(arguments):
    return train.losses(shlex.join(arguments))


@pytest.fixture(scope="module")
def training(eight, small):
    """`training("2x2x1", more options)`: its losses on that mesh, the same on every rank."""

    def run(sizes, *options, steps=20):
        sizes = [int(size) for size in sizes.split("x")]
        mesh = [f"--{axis}={size}" for axis, size in zip(("dp", "pp", "tp"), sizes, strict=True)]
        found = eight(
            math.prod(sizes),
            losses,
            [*small, *mesh, f"--steps={steps}", "--batch=8", "--lr=1e-3", *options],
        )
        assert all(mine == found[0] for mine in found)
        assert len(found[0]) == steps
        return found[0]

    return run


@pytest.fixture(scope="module")
def alone(training):
    """Of one process."""
    return training("1x1x1", "--microbatches=2")


@pytest.mark.parametrize(
    "sizes, steps, options",
    [
        ("2x1x1", 20, ()),
        ("1x2x1", 20, ()),
        ("1x1x2", 20, ()),
        ("2x2x1", 20, ()),
        ("2x2x2", 20, ()),
        ("2x2x2", 6, ("--sequence-parallel", "--recompute", "--schedule=one_f_one_b")),
        ("1x2x2", 6, ("--schedule=zero_bubble_h1",)),
    ],
)
def test_losses_are_the_same_whatever_the_mesh(training, alone, sizes, steps, options):
    """20 steps of Adam at 1e-3, in float32, whose numbers are 1.2e-7 apart."""
    found = training(sizes, "--microbatches=2", *options, steps=steps)
    assert found == pytest.approx(alone[:steps], rel=1e-6)
    assert alone[-1] < alone[0] - 0.1


def test_losses_are_the_same_to_the_bit_where_sums_are(training):
    """Each parameter in one place, and two summands: two micro-batches, or two replicas of one."""
    expected = training("1x1x1", "--microbatches=2", "--untied", steps=4)
    for sizes, microbatches in (("1x2x1", 2), ("2x1x1", 1), ("2x2x1", 1)):
        found = training(sizes, f"--microbatches={microbatches}", "--untied", steps=4)
        assert found == expected, sizes


def kept(arguments):
    """On a rank, after a training: its place, and fingerprints of what it keeps: all of it, what is
    not split over its tensor group, and the tied embedding if it has that."""
    with Training(train.parse(arguments)) as training:
        tied = []
        for step in training:
            assert math.isfinite(step.loss)
        stages = nn.ModuleList(training.pipeline.stages.values())
        for layer in stages.modules():
            if isinstance(layer, VocabularyParallelEmbedding | VocabularyParallelHead):
                tied.append(layer.weight)
        split = {
            id(getattr(layer, name))
            for layer in stages.modules()
            for name in getattr(layer, "splits", ())
        }
        whole = [one.flatten() for one in stages.parameters() if id(one) not in split]
        return (
            training.mesh.place,
            fingerprint(stages),
            fingerprint(torch.cat(whole)),
            [fingerprint(one) for one in tied],
        )


def test_what_several_ranks_keep_stays_equal_to_the_bit(eight, small):
    """Also with dropout, which is other numbers on each replica, and inside a tensor group."""
    found = eight(
        8,
        kept,
        [
            *small,
            "--dp=2",
            "--tp=2",
            "--dropout=0.2",
            "--sequence-parallel",
            "--lr=1e-2",
            "--steps=4",
        ],
    )
    for place, everything, whole, tied in found:
        for other, its_everything, its_whole, its_tied in found:
            if (place.pipeline, place.tensor) == (other.pipeline, other.tensor):
                assert everything == its_everything
            if place.pipeline == other.pipeline:
                assert whole == its_whole
                assert (everything == its_everything) == (place.tensor == other.tensor)
            assert (tied == its_tied) == (place.tensor == other.tensor)


def changed(values, number, *more):
    """A layer's values, one of them slightly wrong in one layer."""
    found = values(number, *more)
    if number == 1:
        found["1.block.mlp.c_fc.bias"][3] += 1e-6
    return found


def misfit(case, arguments):
    """On a rank: what is said of a training that cannot be."""
    rank, prepare = dist.get_rank(), trainer.build_model_and_data

    def other(options):
        model, sequences, *more = prepare(options)
        if rank == 1 and case == "weights":
            model.values = partial(changed, model.values)
        if rank == 1 and case == "passages":
            sequences[2][1] += 1
        return model, sequences, *more

    trainer.build_model_and_data = other
    if case == "seed":
        arguments = [*arguments, f"--seed={rank}"]
    try:
        return train.losses(shlex.join(arguments))
    except UsageError as mistake:
        return str(mistake)
    finally:
        trainer.build_model_and_data = prepare


@pytest.mark.parametrize(
    "ranks, case, options, message",
    [
        (
            2,
            "larger",
            ["--dp=2", "--pp=2", "--tp=2"],
            "a mesh of data 2 x pipeline 2 x tensor 2 has 8 ranks, the world has 2",
        ),
        (
            3,
            "division",
            ["--dp=2"],
            "--dp 2 and --tp 1 cannot share 3 ranks: they are for 2, or a multiple of that",
        ),
        (
            2,
            "batch",
            ["--dp=2", "--batch=6"],
            "--batch 6 cannot be divided into 2 shares of 4 micro-batches of one size",
        ),
        (3, "heads", ["--tp=3"], "3 ranks do not divide 2 heads"),
        (
            2,
            "sequence",
            ["--sequence-parallel"],
            "--sequence-parallel goes with --tp 2 or more, not 1",
        ),
        (2, "seed", ["--tp=2"], "--seed: 0 on rank 0, 1 on rank 1"),
        (2, "weights", ["--tp=2"], "rank 0 and rank 1 have different weights of layer 1"),
        (2, "passages", ["--tp=2"], "rank 0 and rank 1 have different passages"),
        (2, "rate", ["--dp=2", "--lr=1e30"], "is nan: a lower --lr may help"),
    ],
)
def test_a_training_that_cannot_be_is_refused_on_every_rank(
    eight, small, ranks, case, options, message
):
    for told in eight(ranks, misfit, case, [*small, *options]):
        assert message in told
