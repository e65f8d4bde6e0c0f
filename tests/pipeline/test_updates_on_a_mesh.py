"""Schedules that update weights within a step, on a mesh with a tensor axis: as without one."""

from functools import partial

import pytest
import torch
from torch import nn

from naranhi import models, schedules
from naranhi.distributed import Mesh
from naranhi.expert_parallel import add_experts
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel import (
    full_state_dict,
    gpt2_plan,
    parallelize,
    vocabulary_cross_entropy,
)

WORDS, LENGTH, ROWS = 32, 8, 8
ORDERS = {"pipedream": schedules.pipedream(2, 4), "2BW": schedules.pipedream_2bw(2, 2, 2)}


def gpt2(experts=None, **options):
    torch.manual_seed(0)
    config = models.gpt2_config(WORDS, LENGTH, hidden=16, heads=2, blocks=2)
    layers = models.gpt2(config, tied=False, dropout=0.0)
    if experts is not None:
        layers = add_experts(layers, 4, 2, experts, coefficient=0.01, **options)
    nn.ModuleList(layers).double()
    for param in nn.ModuleList(layers).parameters():  # vectors that are not all ones or zeros
        if param.dim() == 1:
            param.data.add_(0.1 * torch.randn_like(param))
    return layers


def trained(layers, order, mesh, loss):
    """{name: whole tensor} of this rank's stages after three steps."""
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    with Pipeline(
        layers,
        ORDERS[order],
        loss,
        group=mesh.pipeline,
        optimizer=lambda own: torch.optim.SGD(own, lr=0.1),
    ) as pipe:
        for _ in range(3):
            pipe.step(tokens, tokens.roll(-1, 1), ROWS * LENGTH / 4)
        return {
            f"{number}.{name}": value
            for stage in pipe.stages.values()
            for number, layer in enumerate(stage.layers, stage.first)
            for name, value in full_state_dict(layer).items()
        }


def beside_no_tensor_axis(order, sequence, experts):
    """On a rank: how far its weights are from those of a pipeline of whole layers."""
    with Mesh(pipeline=2, tensor=2) as mesh:
        whole = gpt2(mesh.data if experts else None)
        expected = trained(whole, order, mesh, models.loss)
        options = {"replicas": mesh.tensor, "tensor": mesh.tensor, "sequence": sequence}
        split = gpt2(mesh.data, **options) if experts else gpt2()
        parallelize(split, gpt2_plan(), mesh.tensor, sequence=sequence)
        loss = partial(vocabulary_cross_entropy, group=mesh.tensor)
        found = trained(split, order, mesh, loss)
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sequence, experts", [(False, False), (True, False), (False, True)])
def test_an_update_has_the_sums_of_the_tensor_group(eight, order, sequence, experts):
    assert max(eight(4, beside_no_tensor_axis, order, sequence, experts)) <= 1e-9


def told(order):
    """On a rank: what is said of experts that have tokens of other ranks."""
    with Mesh(pipeline=2, expert=2) as mesh:
        layers, loss = gpt2(mesh.expert), models.loss
        with pytest.raises(ValueError) as error:
            Pipeline(layers, ORDERS[order], loss, group=mesh.pipeline, optimizer=torch.optim.SGD)
    return str(error.value)


@pytest.mark.parametrize("order", ORDERS)
def test_experts_with_tokens_of_other_ranks_are_refused(eight, order):
    for said in eight(4, told, order):
        assert "cannot be run: the experts of layer" in said and "get tokens of other ranks" in said
