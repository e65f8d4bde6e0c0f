"""Clipping on every mesh, against `torch.nn.utils.clip_grad_norm_` in one process."""

import copy
from functools import partial
from math import inf

import pytest
import small_gpt2
import torch
import torch.distributed as dist
from replicas import make, one_process
from torch import nn

from naranhi import models, schedules, train
from naranhi.data_parallel import all_reduce_bucketed
from naranhi.distributed import Mesh
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel import (
    clip_grad_norm_,
    full_state_dict,
    gpt2_plan,
    mlp_plan,
    parallelize,
    sum_sequence_gradients,
    vocabulary_cross_entropy,
)
from naranhi.tensor_parallel.gradient_norm import norm_of_parts
from naranhi.train import Training

NORMS = 2.0, 1.0, 3.0, inf


def expected(work):
    """The gradients of one process, by layer; and, by norm type, their norm."""
    gradients = one_process(work, 1, 1)
    every = list({id(one): one for layer in gradients for one in layer}.values())  # ties once
    return gradients, {kind: nn.utils.get_total_norm(every, kind).item() for kind in NORMS}


def whole_gradients(layers):
    """The layers' gradients, unsplit, by name."""
    kept = {name: parameter.data for name, parameter in layers.named_parameters()}
    for parameter in layers.parameters():
        parameter.data = parameter.grad
    state = full_state_dict(layers)
    for name, parameter in layers.named_parameters():
        parameter.data = kept[name]
    return [state[name].clone() for name in kept]


def clipped(sizes, work, sequence=False):
    """On a rank, in float64: by norm type, the norm before clipping it to half and after, over that
    of one process; and how far a clipped gradient is from half of that one's, over its largest."""
    torch.set_default_dtype(torch.float64)
    found = {}
    try:
        gradients, norms = expected(work)
        layers, loss, inputs, targets, count = make(work)
        with Mesh(*sizes) as mesh:
            if mesh.sizes.tensor > 1:
                parallelize(layers, gpt2_plan(), mesh.tensor, sequence=sequence)
                loss = partial(vocabulary_cross_entropy, group=mesh.tensor)
            share = [one.chunk(mesh.sizes.data)[mesh.place.data] for one in (inputs, targets)]
            schedule = schedules.one_f_one_b(mesh.sizes.pipeline, 4)
            with Pipeline(layers, schedule, loss, group=mesh.pipeline, replicas=mesh.data) as pipe:
                pipe.step(*share, count)
                sum_sequence_gradients(nn.ModuleList(pipe.stages.values()))
                unclipped = {one: one.grad.clone() for one in pipe.parameters()}
                for kind, norm in norms.items():
                    for parameter, gradient in unclipped.items():
                        parameter.grad.copy_(gradient)
                    before = pipe.clip_grad_norm_(norm / 2, kind)
                    off = max(
                        ((mine - other / 2).abs().max() / other.abs().max()).item()
                        for stage in pipe.stages.values()
                        for number, layer in enumerate(stage.layers, stage.first)
                        for mine, other in zip(
                            whole_gradients(layer), gradients[number], strict=True
                        )
                    )
                    pipe.clip_grad_norm_(1e30, kind)  # which changes nothing
                    found[kind] = before / norm, 2 * pipe.clip_grad_norm_(1e30, kind) / norm, off
    finally:
        torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.parametrize(
    "sizes, sequence",
    [
        ((1, 1, 1), False),
        ((1, 2, 1), False),
        ((2, 2, 1), False),
        ((1, 1, 2), False),
        ((1, 2, 2), False),
        ((2, 2, 2), False),
        ((2, 1, 2), True),
        ((2, 2, 2), True),
    ],
)
@pytest.mark.parametrize("work", ["gpt2", "tied gpt2"])
def test_a_norm_is_that_of_the_whole_model(eight, sizes, sequence, work):
    for found in eight(sizes[0] * sizes[1] * sizes[2], clipped, sizes, work, sequence):
        for norm_type, (before, after, off) in found.items():
            assert before == pytest.approx(1, rel=1e-6), norm_type
            # Scaled by max_norm / (norm + 1e-6), as torch does.
            assert after == pytest.approx(1, rel=1e-4), norm_type
            assert off < 1e-4, norm_type


def counted_twice(sizes, work):
    """On a rank: the norm over that of one process, if nobody looks for copies."""
    layers, loss, inputs, targets, count = make(work)
    norm = expected(work)[1][2.0]
    with (
        Mesh(*sizes) as mesh,
        Pipeline(
            layers, schedules.gpipe(mesh.sizes.pipeline, 4), loss, group=mesh.pipeline
        ) as pipe,
    ):
        pipe.step(inputs, targets, count)
        gradients = [parameter.grad for parameter in pipe.parameters()]
        return norm_of_parts({(): gradients}, 2.0, [mesh.pipeline]) / norm


def test_a_tied_copy_would_show(eight):
    assert all(ratio > 1.01 for ratio in eight(2, counted_twice, (1, 2, 1), "tied gpt2"))
    assert eight(2, counted_twice, (1, 2, 1), "gpt2") == pytest.approx([1, 1], rel=1e-5)


def replicas():
    """On a rank: the norm of a model of which each rank has a copy, and that of one process. An
    attribute of the model happens to be called as one of tensor parallelism's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(6, 4)
    model[0].splits = ("weight",)
    model(x).sum().backward()
    alone = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    model.zero_grad()
    model(x.chunk(2)[dist.get_rank()]).sum().backward()
    all_reduce_bucketed(model)
    return clip_grad_norm_(model, 1.0), alone


def test_replicas_count_once(eight):
    for norm, alone in eight(2, replicas):
        assert norm == pytest.approx(alone, rel=1e-6)


def split_over_the_default_group():
    """On a rank: the norm of an MLP whose layers are split over all ranks, and that of one process;
    the plan is applied without naming a group."""
    torch.manual_seed(0)
    layers, x = models.mlp(2, 8), torch.randn(6, 8)
    alone = copy.deepcopy(layers)
    nn.Sequential(*alone)(x).sum().backward()
    expected = nn.utils.get_total_norm([p.grad for layer in alone for p in layer.parameters()])
    layers = copy.deepcopy(parallelize(layers, mlp_plan()))
    nn.Sequential(*layers)(x).sum().backward()
    return clip_grad_norm_(nn.ModuleList(layers), 1.0), expected.item()


def test_shards_over_the_default_group_are_summed(eight):
    for norm, alone in eight(2, split_over_the_default_group):
        assert norm == pytest.approx(alone, rel=1e-6)


def not_finite():
    """On a rank of a pipeline: the error where one stage has a NaN; and whether gradients are as
    they were."""
    layers, loss, inputs, targets, count = make("gpt2")
    with Pipeline(layers, schedules.gpipe(2, 4), loss) as pipe:
        pipe.step(inputs, targets, count)
        first = next(pipe.parameters())
        if dist.get_rank() == 1:
            first.grad[0] = float("nan")
        before = [parameter.grad.clone() for parameter in pipe.parameters()]
        try:
            pipe.clip_grad_norm_(1.0)
        except FloatingPointError as error:
            same = all(
                torch.equal(one.nan_to_num(7), parameter.grad.nan_to_num(7))
                for one, parameter in zip(before, pipe.parameters(), strict=True)
            )
            return str(error), same
    return None


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank(eight):
    assert eight(2, not_finite) == [("the gradients' norm is nan", True)] * 2


def too_early():
    """On a rank: the error of clipping before the gradients of the sequence are summed."""
    layers, _, inputs, targets, count = make("gpt2")
    with Mesh(1, 1, 2) as mesh:
        parallelize(layers, gpt2_plan(), mesh.tensor, sequence=True)
        loss = partial(vocabulary_cross_entropy, group=mesh.tensor)
        with Pipeline(layers, schedules.gpipe(1, 4), loss, group=mesh.pipeline) as pipe:
            pipe.step(inputs, targets, count)
            with pytest.raises(RuntimeError) as error:
                pipe.clip_grad_norm_(1.0)
    return str(error.value)


def test_parts_of_the_sequence_must_be_summed_first(eight):
    for told in eight(2, too_early):
        assert "is this rank's part of a sum: call sum_sequence_gradients before clipping" in told


def losses(arguments):
    """By SGD: to Adam the size of a gradient hardly matters."""
    options = train.parse(arguments.split())
    with Training(options) as training:
        training.optimizer = torch.optim.SGD(training.pipeline.parameters(), lr=3.0)
        return [step.loss for step in training]


def test_training_clips_alike_on_every_mesh(eight, tmp_path):
    options = "--steps 4 --microbatches 2 --clip 0.1 "
    options += " ".join(small_gpt2.write(tmp_path)) + " "
    alone = eight(1, losses, options)[0]
    assert eight(1, losses, options.replace("--clip 0.1", ""))[0][-1] != pytest.approx(
        alone[-1], rel=1e-3
    ), "or clipping would not matter"
    for ranks, mesh in ((2, "--pp 2"), (8, "--dp 2 --pp 2 --tp 2 --sequence-parallel")):
        for found in eight(ranks, losses, options + mesh):
            assert found == pytest.approx(alone, rel=1e-4), mesh
