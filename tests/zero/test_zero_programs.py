"""Steps in any order that a training loop may have, against one process that does the same."""

import copy
import random
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from naranhi.zero import Zero, children, joined

STEPS = 5
BETWEEN = "evaluate", "micro-batch", "micro-batch", "graph unused", "forward fails", "absent"
LAST = "inside", "forward before", "forward twice", "backward twice", "evaluate inside"


class Model(nn.Module):
    """One layer used twice, two computed again in the backward, and perhaps a root's parameter."""

    def __init__(self, with_root):
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(4)) if with_root else 1.0
        self.fails = False

    def forward(self, x):
        x = self.a(self.b(self.a(x)))
        if self.fails:
            raise ValueError("a forward fails")
        x = x + checkpoint(self.c, x, use_reentrant=False)
        return checkpoint(self.d, x, use_reentrant=True) * self.scale


def program(seed, ranks):
    """Some steps on each rank; where the sharded model first differs, or None."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Model(draw.random() < 0.5).double()
    one = copy.deepcopy(model)
    units = list(joined(children(model), 40)) if draw.random() < 0.5 else None
    stage = draw.choice([1, 2, 3, 3, 3])
    zero = Zero(model, stage, units=units, group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.05)
    optimizer_of_one = torch.optim.SGD(one.parameters(), lr=0.05)
    done = []

    def loss(model, x):
        return model(x).square().sum()

    def all_of(rows):
        for x in rows:
            loss(one, x).backward()

    def between(what, rows):
        x = rows[rank]
        match what:
            case "evaluate":
                with torch.no_grad():
                    model(x)
            case "micro-batch":
                with zero.no_sync():
                    loss(model, x).backward()
                all_of(rows)
            case "graph unused":
                model(x)
            case "forward fails":
                model.fails = True
                with suppress(ValueError):
                    model(x)
                model.fails = False
                zero.zero_grad()
                one.zero_grad()
            case "absent" if stage == 3 and ranks > 1:
                absent = draw.randrange(ranks)
                with pytest.raises(RuntimeError, match=f"rank {absent} has no forward"):
                    if rank != absent:
                        loss(model, x).backward()
                    zero.step(optimizer)
                zero.zero_grad()
                one.zero_grad()

    def last(what, rows):
        x = rows[rank]
        before = loss(model, x) if what == "forward before" else None
        match what:
            case "forward before":
                before.backward()
            case "forward twice":
                (loss(model, x) + loss(model, 2 * x)).backward()
                all_of(2 * rows)
            case "backward twice":
                with zero.no_sync():
                    loss(model, x).backward()
                    loss(model, 2 * x).backward()
                all_of(2 * rows)  # which step() sums
            case "evaluate inside":
                with torch.no_grad():
                    model(x)
                loss(model, x).backward()
            case _:
                loss(model, x).backward()
        all_of(rows)

    def rows():
        return torch.randn(ranks, 3, 4, generator=numbers, dtype=torch.float64)

    for _ in range(STEPS):
        for _ in range(draw.randrange(3)):
            done.append(draw.choice(BETWEEN))
            between(done[-1], rows())
        done.append(draw.choice(LAST))
        last(done[-1], rows())
        zero.step(optimizer)
        optimizer_of_one.step()
        one.zero_grad()
        with zero.gathered():
            for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
                if not torch.allclose(a, b, rtol=0, atol=1e-11):
                    return stage, name, done
    return None


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_programs(five, ranks, seed):
    assert five.call(program, seed, ranks) == [None] * 5
