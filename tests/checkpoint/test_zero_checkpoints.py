"""ZeRO goes on from a checkpoint, on any number of ranks, with what is not trained."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from checkpointed import boxes_of, put_together, shapes_in
from gloo_ranks import first_ranks
from one_process import MAKE, OPTIMIZERS, share
from torch import nn

from naranhi.autograd import Recompute
from naranhi.checkpoint import Checkpoints
from naranhi.data_parallel import DDP
from naranhi.zero import Zero

SHARES = 4  # of each step, whatever the number of ranks


def run(ranks, work, stage, precision, steps, folder):
    """Steps of training from the newest checkpoint; saves at the end.

    Losses, and what the rank has at first and in the end."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    torch.manual_seed(rank)
    model, loss = MAKE[work]()
    zero = Zero(
        model,
        stage,
        group=group,
        precision=precision,
        units=[] if ranks == 2 else None,  # not the units of the others
        param_groups=[
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
    )
    optimizer, losses = OPTIMIZERS["adamw 0.001"](zero.param_groups), []
    with Checkpoints(folder, keep=1, group=group) as checkpoints:
        if steps[0]:
            assert checkpoints.load(zero, optimizer).step == steps[0]
        begin = boxes_of(zero, optimizer)
        for step in range(*steps):
            shares = [share(work, step, place) for place in range(SHARES)]
            count = sum(valid for _, _, valid in shares)
            total = torch.zeros(())
            own = shares[rank * SHARES // ranks : (rank + 1) * SHARES // ranks]
            with zero.no_sync():
                for inputs, targets, _ in own[:-1]:
                    part = loss(model(inputs), targets)
                    total += part.detach()
                    (part / count).backward()
            part = loss(model(own[-1][0]), own[-1][1])
            (part / count).backward()
            total += part.detach()
            dist.all_reduce(total, group=group)
            losses.append(total.item() / count)
            zero.clip_grad_norm_(1.0)
            zero.step(optimizer)
        checkpoints.save(steps[1], zero, optimizer)
        assert checkpoints.steps() == [steps[1]]
    return losses, begin, boxes_of(zero, optimizer)


@pytest.mark.parametrize(
    "work, stage, precision",
    [("mlp", 1, "fp32"), ("tied gpt2", 2, "fp32"), ("tied gpt2", 3, "fp32"), ("mlp", 3, "bf16")],
)
def test_training_goes_on_where_it_was_stopped(five, tmp_path, work, stage, precision):
    """On 4 ranks, then 2, then 1, then 4: each finds the very numbers that the one before left."""
    whole = five.call(run, 4, work, stage, precision, (0, 8), str(tmp_path / "whole"))[0][0]
    losses, left = [], None
    for i, ranks in enumerate([4, 2, 1, 4]):
        steps, folder = (2 * i, 2 * i + 2), tmp_path / "state"
        answers = five.call(run, ranks, work, stage, precision, steps, str(folder))[:ranks]
        shapes = shapes_in(folder / f"step-{steps[1]:08d}")
        if i:
            at_first = put_together([begin for _, begin, _ in answers], shapes)
            assert at_first.keys() == left.keys()
            assert all(torch.equal(at_first[name], tensor) for name, tensor in left.items())
        left = put_together([end for *_, end in answers], shapes)
        losses += answers[0][0]
    bound = {"rel": 2e-6} if precision == "fp32" else {"rel": 2e-2}
    assert losses == pytest.approx(whole, **bound)
    assert losses[-1] != losses[0]


def with_frozen(folder, kinds):
    """Save a model with frozen weights, a buffer and a scalar; load it into others of each kind."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return

    def new(seed, kind):
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3)]
        layers[2].scale = nn.Parameter(torch.rand(()))
        layers[0].requires_grad_(False)
        layers[1].register_buffer("fleeting", torch.full((1,), float(seed)), persistent=False)
        model = nn.Sequential(*layers)
        if kind[0] == "recompute":
            return nn.Sequential(*map(Recompute, layers)), model, model.parameters()
        if kind[0] == "ddp":
            return DDP(model, group), model, model.parameters()
        zero = Zero(model, kind[0], group=group, precision=kind[1])
        return zero, model, zero.param_groups

    outputs = []
    for number, kind in enumerate(kinds):
        state, model, params = new(number, kind)
        params = [p for p in params if isinstance(p, dict) or p.requires_grad]
        optimizer = torch.optim.SGD(params, lr=0.1)
        with Checkpoints(folder, group=group) as checkpoints, torch.no_grad():
            if number:
                assert checkpoints.load(state, optimizer).step == 7
                assert model[1].fleeting == number
            else:
                model.train()(torch.rand(4, 3))  # running statistics
                checkpoints.save(7, state, optimizer)
            outputs.append(model.eval()(torch.ones(1, 3)))
            assert torch.equal(outputs[0], outputs[-1]), kind
        if kind[0] != "recompute":
            state.close()


@pytest.mark.parametrize("stage, precision", [(1, "fp32"), (3, "fp32"), (3, "bf16")])
def test_what_is_not_trained_is_saved_too(five, tmp_path, stage, precision):
    """And by its name: into DDP, into what is recomputed, and into other stages."""
    kinds = [(stage, precision), (2, precision)]
    kinds += [("recompute",), ("ddp",), (3, "fp32")] if precision == "fp32" else []
    five.call(with_frozen, str(tmp_path / "state"), kinds)


class Scaled(nn.Linear):
    """Has a parameter without dimensions."""

    def __init__(self):
        super().__init__(3, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


class Odd(nn.Module):
    """Has a parameter without elements, which is alone in its unit."""

    def __init__(self, dims):
        super().__init__()
        self.scaled, self.nothing = Scaled(), nn.Parameter(torch.zeros(*dims))

    def forward(self, x):
        return self.scaled(x) + self.nothing.sum()


def with_empty(folder, kind, dims):
    """On a rank: what is trained in four steps, and in two and two from a checkpoint."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None

    def trained(first, last):
        torch.manual_seed(first)
        model = Odd(dims)
        state = model if kind is None else Zero(model, kind, group=group)
        params = state.param_groups if kind else model.parameters()
        optimizer = torch.optim.Adam(params, lr=0.1)
        with Checkpoints(folder, group=group) as checkpoints:
            if first:
                checkpoints.load(state, optimizer)
            for step in range(first, last):
                model.zero_grad()
                model(torch.ones(2, 3)).square().sum().backward()
                state.step(optimizer) if kind else optimizer.step()
                if step == 1:
                    checkpoints.save(2, state, optimizer)
        with state.gathered() if kind else nullcontext():
            return [param.tolist() for param in model.parameters()]

    return trained(0, 4), trained(2, 4)


@pytest.mark.parametrize("dims", [(0,), (0, 3)])
@pytest.mark.parametrize("kind", [None, 1, 3])
def test_adam_goes_on_with_a_parameter_without_elements(five, tmp_path, kind, dims):
    for whole, resumed in five.call(with_empty, str(tmp_path / "state"), kind, dims)[:2]:
        assert resumed == whole
