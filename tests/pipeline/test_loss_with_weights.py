"""Parameters out of the ordinary: of the loss, and those that a stage hands on."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import Ranks
from torch import nn

from naranhi import pipeline, schedules
from naranhi.autograd import splittable

RATE, UPDATES = 0.02, 5


class Projected(nn.Module):
    """The squared error of an output times a matrix that is trained."""

    def __init__(self, value=1.0):
        super().__init__()
        self.head = nn.Parameter(value * torch.eye(4))

    def forward(self, output, target):
        return (output @ self.head - target).square().sum()


class Queries(nn.Module):
    """Hands on a parameter, or a view of it, beside its output."""

    def __init__(self, how):
        super().__init__()
        self.up, self.query, self.how = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), how

    def forward(self, x):
        view = {"itself": self.query, "expanded": self.query.expand(len(x), 4)}.get(self.how)
        return self.up(x), self.query[:4] if view is None else view


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, both):
        return self.up(both[0] + both[1])


@pytest.fixture(scope="module")
def two():
    with Ranks(2, deadline=30.0) as ranks:
        yield ranks


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4 * UPDATES, 4, generator=generator)


def two_buffered():
    """How far weights are after updates of 2BW from those of its loop; how far the head moved."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    torch.manual_seed(0)
    layer, loss, (inputs, targets) = nn.Linear(4, 4, bias=False), Projected(), batch()
    versions = [[layer.weight.detach().clone(), loss.head.detach().clone()]]
    with pipeline.Pipeline(
        [layer],
        schedules.pipedream_2bw(1, 2, UPDATES),
        loss,
        group=alone,
        optimizer=lambda own: torch.optim.SGD(own, lr=RATE),
    ) as pipe:
        pipe.step(inputs, targets, 4)
        found = [weight.detach() for weight in pipe.parameters()]
    parts = zip(inputs.chunk(2 * UPDATES), targets.chunk(2 * UPDATES), strict=True)
    for update in range(UPDATES):
        weight, head = (w.clone().requires_grad_() for w in versions[max(0, update - 1)])
        for _, (x, y) in zip(range(2), parts, strict=False):
            ((x @ weight.T @ head - y).square().sum() / 4).backward()
        newest = zip(versions[-1], (weight.grad, head.grad), strict=True)
        versions.append([value - RATE * grad for value, grad in newest])
    moved = (versions[-1][1] - versions[0][1]).abs().max().item()
    gaps = [(a - b).abs().max().item() for a, b in zip(found, versions[-1], strict=True)]
    return max(gaps), moved


def test_its_weights_have_the_version_of_the_layers(two):
    for gap, moved in two.call(two_buffered):
        assert gap < 1e-6 < 1e-2 < moved


def replicas_with(values):
    groups = [dist.new_group([rank]) for rank in range(2)]
    rank = dist.get_rank()
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"loss_fn\.head") as error:
        pipeline.Pipeline(
            [nn.Linear(4, 4)],
            schedules.gpipe(1, 2),
            Projected(values[rank]),
            group=groups[rank],
            replicas=dist.group.WORLD,
        )
    return str(error.value)


def test_replicas_of_it_are_equal_too(two):
    words = two.call(replicas_with, (1.0, 2.0))
    assert words[0] == words[1]


def handed_on(how, mode, split):
    """On a rank: the loss of an evaluation after a step, and that of one process."""
    torch.manual_seed(0)
    layers, (inputs, targets) = [Queries(how), Added()], batch()
    if split:
        layers = splittable(layers)
    order = schedules.zero_bubble_h1(2, 2) if split else schedules.gpipe(2, 2)
    loss = lambda output, target: (output - target).square().sum()  # noqa: E731
    with pipeline.Pipeline(layers, order, loss) as pipe:
        pipe.step(inputs, targets, 4)
        with getattr(torch, mode)():
            found = pipe.step(inputs, targets, 4)
    expected = loss(nn.Sequential(*layers)(inputs), targets) / 4
    return None if found is None else abs(found - expected).item()


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("how", ["itself", "expanded", "cut"])
@pytest.mark.parametrize("split", [False, True])
def test_a_parameter_that_is_handed_on_is_evaluated(two, how, mode, split):
    first, last = two.call(handed_on, how, mode, split)
    assert first is None and last <= 1e-5
