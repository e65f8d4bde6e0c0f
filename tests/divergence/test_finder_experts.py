"""The finder on meshes with experts and with a cut sequence: silent where ranks are right."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from naranhi import divergence, models, schedules
from naranhi.collectives import ring
from naranhi.context_parallel import cut_sequence, split_sequence
from naranhi.distributed import Mesh
from naranhi.expert_parallel import (
    MoE,
    add_experts,
    auxiliary_loss,
    expert_parameters,
    gradients,
)
from naranhi.pipeline import Pipeline
from naranhi.zero import Zero

WORDS, LENGTH, ROWS, MICROBATCHES, BALANCE = 19, 8, 8, 2, 0.1


def gpt2(**options):
    torch.manual_seed(0)
    config = models.gpt2_config(WORDS, LENGTH, hidden=8, heads=2, blocks=2)
    return add_experts(models.gpt2(config, dropout=0.0), 4, 2, **options)


def batch():
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


def alone(layers):
    tokens, targets = (x.chunk(MICROBATCHES) for x in batch())
    model = nn.Sequential(*layers)
    for some, wanted in zip(tokens, targets, strict=True):
        loss = models.loss(model(some), wanted) / (ROWS * LENGTH)
        (loss + BALANCE / MICROBATCHES * auxiliary_loss(model)).backward()


def update(params):
    torch.optim.SGD(params, lr=0.1).step()


def broken(name, patch, layers):
    """Make the parallel model wrong."""
    if name == "experts":  # nothing sums them
        patch.setattr(
            gradients, "expert_parameters", lambda model: dict.fromkeys(expert_parameters(model))
        )
    elif name == "weights":
        moe = next(one for one in nn.ModuleList(layers).modules() if isinstance(one, MoE))
        with torch.no_grad():
            moe.up[0, 0, 0] += 0.01


def stepped_by_zero(zero, tokens, targets):
    """A step of micro-batches, of which the last one's backward sums."""
    micro = [x.chunk(MICROBATCHES) for x in (tokens, targets)]
    for number, (some, wanted) in enumerate(zip(*micro, strict=True)):
        with contextlib.nullcontext() if number == MICROBATCHES - 1 else zero.no_sync():
            (models.loss(zero.model(some), wanted) / (ROWS * LENGTH)).backward()


def found_under_zero(stage, name=None):
    """On a rank: as `found`, of a `Zero` on four ranks."""
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    reference = divergence.trace(
        gpt2(group=groups[dist.get_rank()]),
        alone,
        update=lambda layers: update(nn.ModuleList(layers).parameters()),
    )
    with Mesh(expert=2, data=2) as mesh, pytest.MonkeyPatch.context() as patch:
        options = {"group": mesh.expert, "replicas": mesh.expert_replicas}
        layers = gpt2(**options, coefficient=BALANCE / MICROBATCHES)
        if name == "experts":  # only this rank's tokens, though the copies' count, too
            patch.setattr(ring, "reduce_scatter", left_out(mesh.expert_replicas))
        own = mesh.place.data * mesh.sizes.expert + mesh.place.expert
        rows = torch.arange(ROWS).view(MICROBATCHES, 4, -1)[:, own].flatten()
        tokens, targets = (x[rows] for x in batch())
        zero = Zero(nn.Sequential(*layers), stage)
        report = divergence.find(
            zero,
            lambda zero: stepped_by_zero(zero, tokens, targets),
            reference,
            mesh=mesh,
            update=lambda zero: zero.step(torch.optim.SGD(zero.param_groups, lr=0.1)),
        )
    first = report.divergence
    return report.compared, first and (first.phase, first.layer, first.axis)


def left_out(group):
    """A reduce-scatter that sums nothing over this group."""
    whole = ring.reduce_scatter

    def reduce_scatter(blocks, output, where, rank, ranks):
        return iter(()) if where is group else whole(blocks, output, where, rank, ranks)

    return reduce_scatter


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_found_where_zero_shards_experts(eight, stage):
    for compared, place in eight(4, found_under_zero, stage):
        assert place is None and compared > 100
    for _, place in eight(4, found_under_zero, stage, "experts"):
        assert place[:2] == ("gradient", "2.block.mlp.moe.down")


def found(sizes, name=None):
    """On a rank: whether the finder finds nothing; where, and what."""
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    reference = divergence.trace(
        gpt2(group=groups[dist.get_rank()]),
        alone,
        update=lambda layers: update(nn.ModuleList(layers).parameters()),
    )
    with Mesh(**sizes) as mesh, pytest.MonkeyPatch.context() as patch:
        layers = gpt2(
            group=mesh.expert,
            replicas=mesh.expert_replicas,
            coefficient=BALANCE / MICROBATCHES,
        )
        broken(name, patch, layers)
        if mesh.sizes.context > 1:
            cut_sequence(layers, mesh.context)
        several = mesh.sizes.data * mesh.sizes.expert
        own = mesh.place.data * mesh.sizes.expert + mesh.place.expert
        rows = torch.arange(ROWS).view(MICROBATCHES, several, -1)[:, own].flatten()
        tokens, targets = (x[rows] for x in batch())
        targets = split_sequence(targets, mesh.context)
        schedule = schedules.gpipe(mesh.sizes.pipeline, MICROBATCHES)
        with Pipeline(
            layers, schedule, models.loss, group=mesh.pipeline, replicas=mesh.replicas
        ) as pipe:
            report = divergence.find(
                pipe,
                lambda pipe: pipe.step(tokens, targets, ROWS * LENGTH),
                reference,
                mesh=mesh,
                update=lambda pipe: update(pipe.parameters()),
            )
    first = report.divergence
    return report.compared, first and (first.phase, first.layer, first.axis)


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert": 2, "data": 2},
        {"expert": 2, "pipeline": 2},
        {"expert": 2, "context": 2},
        {"context": 2, "pipeline": 2},
    ],
)
def test_nothing_is_found_where_ranks_are_right(eight, sizes):
    for compared, place in eight(4, found, sizes):
        assert place is None and compared > 100


@pytest.mark.parametrize(
    "name, place",
    [
        ("experts", ("gradient", "2.block.mlp.moe.down")),
        ("weights", ("forward", "2.block.mlp")),
    ],
)
def test_what_is_wrong_is_found(eight, name, place):
    for _, where in eight(4, found, {"expert": 2, "data": 2}, name):
        assert where[:2] == place
