"""`load(strict=False)`: what model and checkpoint both have, on any mesh; the rest is named."""

import pytest
import torch
import torch.distributed as dist
from checkpointed import Run, refusal
from torch import nn

from naranhi import schedules
from naranhi.checkpoint import Checkpoints
from naranhi.pipeline import Pipeline
from naranhi.zero import Zero

HIDDEN = 16


class Head(nn.Module):
    """A new head in place of the old: another name, and a buffer and extra state of its own."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(HIDDEN, 3)
        self.register_buffer("scale", torch.ones(()))

    def get_extra_state(self):
        return "fresh"

    def set_extra_state(self, state):
        raise AssertionError("there is none in the checkpoint")

    def forward(self, x):
        return self.scale * self.score(x)


def with_a_head():
    """The layers of `Run("plain untied")`, other weights, and the new head."""
    layers = Run("plain untied").model
    layers[-1] = Head()
    with torch.no_grad():
        for param in nn.ModuleList(layers).parameters():
            param.fill_(7.0)
    return nn.Sequential(*layers)


def saved_then_loaded(folder, kind, stage):
    """On a rank: what is named, and by how much the weights of both, and of one, are wrong."""
    before = Run(kind + " untied")
    expected = full_of(before)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, before.model)
        model = with_a_head()
        after = Zero(model, stage) if stage else model
        told = refusal(lambda: checkpoints.load(after))
        given = refusal(
            lambda: checkpoints.load(
                after,
                torch.optim.SGD(after.param_groups if stage else model.parameters(), lr=0.1),
                strict=False,
            )
        )
        found = checkpoints.load(after, strict=False)
    if stage:
        after.close()
    own = model.state_dict()
    common = max((own[name] - value).abs().max() for name, value in expected.items() if name in own)
    new = {value for name in found.missing if name in own for value in own[name].unique().tolist()}
    return told, given, found.missing, found.unexpected, common.item(), new


def full_of(run):
    """The whole model, which every rank makes of the same seed."""
    plain = Run("plain untied").model
    return nn.ModuleList(plain).state_dict()


@pytest.mark.parametrize("kind, stage", [("plain", 0), ("1x2x2", 3), ("zero3", 1)])
def test_what_both_have_is_loaded_and_the_rest_is_named(eight, tmp_path, kind, stage):
    for told, given, missing, unexpected, wrong, new in eight(
        4, saved_then_loaded, str(tmp_path), kind, stage
    ):
        assert "has no parameter 3." in told
        assert "or with strict=False what both have" in told
        assert given == "strict=False loads a model alone, without an optimizer"
        assert missing == ["3.score.weight", "3.score.bias", "3.scale", "3"]
        assert all(name.startswith("3.") for name in unexpected) and len(unexpected) == 3
        assert wrong == 0 and new == {7.0, 1.0}


def strangers(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, nn.Linear(2, 2))
        other = nn.Sequential(nn.Linear(2, 2))
        nothing = refusal(lambda: checkpoints.load(other, strict=False))
        other = nn.Linear(3, 2)
        shape = refusal(lambda: checkpoints.load(other, strict=False))
        alike = refusal(lambda: checkpoints.load(nn.Linear(2, 2), strict=dist.get_rank() == 0))
        return nothing, shape, alike


def test_names_in_common_and_equal_shapes_are_needed(eight, tmp_path):
    for nothing, shape, alike in eight(2, strangers, str(tmp_path)):
        assert nothing == "the checkpoint and the model have no parameter of the same name"
        assert "weight has shape [2, 2] and dtype float32 in the checkpoint, and shape" in shape
        assert alike == "strict: True on rank 0, False on rank 1"


def with_optimizers_of_their_own(folder):
    """What both have, in a pipeline whose stages have optimizers."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    make = lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9)  # noqa: E731
    with (
        Checkpoints(folder) as checkpoints,
        Pipeline(layers, schedules.pipedream(2, 2), error_of, optimizer=make) as pipe,
    ):
        pipe.step(torch.ones(4, 2), torch.zeros(4, 2), 2)
        checkpoints.save(1, pipe)
        saved = [param.clone() for param in pipe.parameters()]
        pipe.step(torch.ones(4, 2), torch.zeros(4, 2), 2)
        found = checkpoints.load(pipe, strict=False)
        same = all(map(torch.equal, saved, pipe.parameters()))
    return found.missing, found.unexpected, same


def error_of(output, target):
    return (output - target).square().sum()


def test_stages_with_optimizers_are_loaded_without_them(eight, tmp_path):
    assert eight(2, with_optimizers_of_their_own, str(tmp_path)) == [([], [], True)] * 2
