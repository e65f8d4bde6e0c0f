"""What a stage hands on is its own: it may be on its way while the stage works on."""

import pytest
import torch
from torch import nn

from naranhi.pipeline.shape_inference import StageSignature
from naranhi.pipeline.stage import Stage
from naranhi.pipeline.weight_stash import WeightStash


class Positions(nn.Module):
    """Its weight is as large as a micro-batch of one row, and has the very gradient that the input
    has, each by way of a view: autograd then gives both the same storage."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return (x.transpose(0, 1) + self.position.view(3, 1, 4)) * 2


class Loss(Positions):
    """The same in a loss: the outputs of the stage are its inputs."""

    def forward(self, output, target):
        return super().forward(output).sum()


@pytest.mark.parametrize("versions", [False, True])
def test_a_gradient_on_its_way_is_not_added_to_by_the_loss(versions):
    loss = Loss()
    stage = Stage([nn.Identity()], 0, loss)
    if versions:
        stage.weights = WeightStash(stage, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    stage.begin()
    handed_on, signature = [], StageSignature.of(torch.zeros(1, 3, 4, requires_grad=True))
    for k in range(3):
        stage.run_forward(k, [torch.randn(1, 3, 4)], signature, signature, None, 1)
        handed_on += stage.run_backward(k, None)
    assert all(torch.equal(one, torch.full((1, 3, 4), 2.0)) for one in handed_on)
    assert torch.equal(loss.position.grad, torch.full((3, 4), 6.0))


@pytest.mark.parametrize("versions", [False, True])
def test_a_gradient_on_its_way_is_not_added_to(versions):
    stage = Stage([Positions()], 0)
    if versions:
        stage.weights = WeightStash(stage, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    stage.begin()
    handed_on = []
    for k in range(3):
        x = torch.randn(1, 3, 4)
        takes, gives = (
            StageSignature.of(one.clone().requires_grad_()) for one in (x, x.transpose(0, 1))
        )
        (output,) = stage.run_forward(k, [x], takes, gives, None, 1)
        handed_on += stage.run_backward(k, [torch.ones_like(output)])
    assert all(torch.equal(one, torch.full((1, 3, 4), 2.0)) for one in handed_on)
    (parameter,) = stage.layers.parameters()
    assert torch.equal(parameter.grad, torch.full((3, 4), 6.0))


@pytest.mark.parametrize(
    "loss, error, words",
    [
        (lambda output, target: (output.sum(), output), TypeError, "loss_fn returned tuple"),
        (lambda output, target: 0.0, TypeError, "loss_fn returned float, not a scalar tensor"),
        (lambda output, target: output.sum(1), ValueError, r"a tensor of shape \(3,\)"),
    ],
)
def test_a_loss_that_is_not_a_scalar_is_refused(loss, error, words):
    stage, x = Stage([nn.Identity()], 0, loss), torch.randn(3, 4)
    with pytest.raises(error, match=words):
        stage.run_forward(0, [x], StageSignature.of(x), StageSignature.of(x), None, 1)
