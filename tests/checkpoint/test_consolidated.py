"""The whole model on rank 0, from any mesh: what one process has after the same steps."""

import pytest
import torch
from checkpointed import Run, refusal
from torch import nn

from naranhi import models, schedules
from naranhi.checkpoint import consolidated_state_dict
from naranhi.data_parallel import DDP
from naranhi.distributed import Mesh
from naranhi.pipeline import Pipeline

MESHES = [
    (1, "plain"),
    (8, "2x2x2"),
    (2, "1x1x2"),
    (4, "2x1x2 zero3 untied"),
    (3, "3x1x1 zero2 untied"),
    (2, "2x1x1 zero3"),  # both uses of the tied parameter in one stage
    (3, "zero3"),
    (4, "zero2 copied"),
]


def after_a_step(kind):
    run = Run(kind)
    run.step(0)
    found = consolidated_state_dict(run.model)
    loss = run.step(1)  # it goes on
    run.close()
    return found, loss


@pytest.mark.parametrize("ranks, kind", MESHES)
def test_it_is_the_model_of_one_process(eight, ranks, kind):
    untied = " untied" * kind.endswith(" untied")
    [(whole, loss)] = eight(1, by_hand, f"plain{untied}")
    answers = eight(ranks, after_a_step, kind)
    assert [found is None for found, _ in answers] == [False] + [True] * (ranks - 1)
    found = answers[0][0]
    assert set(whole) - set(found) == (set() if untied else {"3.lm_head.weight"})
    assert set(found) <= set(whole)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6, msg=name)
    assert [own for _, own in answers] == pytest.approx([loss] * ranks, abs=1e-6)


def by_hand(kind):
    run = Run(kind)
    run.step(0)
    state = {name: value.clone() for name, value in nn.ModuleList(run.model).state_dict().items()}
    return state, run.step(1)


class Odd(nn.Module):
    """Values of many types: a buffer of one number, booleans, complex numbers, nothing at all."""

    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16).t())
        self.register_buffer("count", torch.tensor(7 + rank))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("waves", torch.tensor([1 + 2j]))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("table", torch.zeros(2), persistent=False)


def odd():
    mesh = Mesh(data=2)
    model = Odd(mesh.place.data)
    found = consolidated_state_dict(model)
    mesh.close()
    return found


def test_values_of_every_type_and_buffers_of_the_first_replica(eight):
    found, nothing = eight(2, odd)
    assert nothing is None
    expected = Odd(0).state_dict()
    assert set(found) == set(expected) == {"weight", "count", "flags", "waves", "none"}
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def wrapped():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = DDP(layers)
    names = consolidated_state_dict(ddp)
    ddp.close()
    different = nn.Linear(2, 2 + torch.distributed.get_rank())
    return names and set(names), refusal(lambda: consolidated_state_dict(different))


def test_ranks_with_different_models_are_refused(eight):
    (names, refused), (_, other) = eight(2, wrapped)
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert refused == other
    assert "give all ranks the same model" in refused


def of_stages_with_optimizers():
    """Names, where each stage has an optimizer that keeps moments."""
    layers, x = models.mlp(4, 4), torch.ones(4, 4)
    schedule = schedules.pipedream(2, 4)
    with Pipeline(
        layers, schedule, lambda y, t: (y - t).square().sum(), optimizer=torch.optim.AdamW
    ) as pipeline:
        pipeline.step(x, x, 4)
        found = consolidated_state_dict(pipeline)
    return found and set(found), set(nn.ModuleList(layers).state_dict())


def test_moments_of_a_stages_own_optimizer_are_left_out(eight):
    (found, expected), _ = eight(2, of_stages_with_optimizers)
    assert found == expected
