"""The finder on meshes with experts and with a cut sequence: silent where ranks are right."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from naranhi import divergence, models, schedules
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
