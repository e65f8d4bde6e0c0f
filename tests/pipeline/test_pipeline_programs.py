"""Training programs drawn at random, each against one process that loops over the micro-batches.

A program draws a schedule, layers, and some steps with what may stand between two steps of a
training loop. After each step everything that a rank has is compared with the one process: loss,
gradients, weights and buffers, to the bit unless weights are tied, whose gradients are sums in
another order.
"""

import random
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_loop import squared_error
from torch import nn
from torch.nn import functional as F

from naranhi import pipeline, schedules
from naranhi.autograd import Recompute, splittable
from naranhi.schedules import versions_read

WIDTH, RATE, STEPS = 8, 0.05, 4

# --- layers --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Computes on the first tensor that it takes, and hands on the others."""

    def forward(self, value):
        if not isinstance(value, tuple):
            return self.compute(value)
        return self.compute(value[0]), *value[1:]


class Do(Layer):
    """What a module does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def compute(self, x):
        return self.module(x)


class Conv(Layer):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def compute(self, x):
        return self.conv(x.unsqueeze(1)).squeeze(1)


class Attention(Layer):
    """Between the two halves of a row."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH // 2, 3 * WIDTH // 2)

    def compute(self, x):
        q, k, v = self.qkv(x.view(-1, 2, WIDTH // 2)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v).reshape(x.shape)


class Rotary(Layer):
    """Caches a table, and one for each length; no inference tensors, which autograd cannot use."""

    def __init__(self):
        super().__init__()
        self.linear, self.table, self.by_length = nn.Linear(WIDTH, WIDTH), None, {}

    def compute(self, x):
        with torch.inference_mode(False):
            if self.table is None:
                self.table = torch.arange(float(WIDTH)).cos()
            if len(x) not in self.by_length:
                self.by_length[len(x)] = torch.arange(float(len(x))).sin()[:, None]
        return self.linear(x) * self.table + self.by_length[len(x)]


class Average(Layer):
    """A buffer that is a new tensor each time, and one that is changed in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def compute(self, x):
        self.calls += 1
        with torch.inference_mode(False):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().clone().mean(0)
        return self.linear(x) - self.mean / self.calls


class Open(nn.Module):
    """Hands on a tuple: in training with one more tensor, the buffer that it changes in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value):
        x, *others = value if isinstance(value, tuple) else (value,)
        self.mean.mul_(0.5).add_(x.detach().float().mean(0), alpha=0.5)
        skip = x if not others else x + others[0]
        return (self.linear(x), skip, self.mean) if self.training else (self.linear(x), skip)


class Close(nn.Module):
    def forward(self, value):
        x, *others = value if isinstance(value, tuple) else (value,)
        for other in others[:2]:
            x = x + other
        return x.float()


class Branch(Layer):
    """Looks at a value: only a trial on data can try it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def compute(self, x):
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


LAYERS = {
    "linear": lambda: Do(nn.Linear(WIDTH, WIDTH)),
    "block": lambda: Do(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
    "norm": lambda: Do(nn.LayerNorm(WIDTH)),
    "batch norm": lambda: Do(nn.BatchNorm1d(WIDTH)),
    "in place": lambda: Do(nn.ReLU(inplace=True)),
    "recompute": lambda: Do(Recompute(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))),
    "conv": Conv,
    "attention": Attention,
    "rotary": Rotary,
    "average": Average,
    "open": Open,
    "close": Close,
    "branch": Branch,
}
SCHEDULES = [
    "gpipe",
    "inter_layer",
    "one_f_one_b",
    "interleaved",
    "interleaved",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "pipedream",
    "pipedream_2bw",
]


def schedule_of(draw, ranks):
    """(what it is called, the schedule)"""
    name = draw.choice(SCHEDULES)
    microbatches = draw.randint(1, 6)
    if name == "interleaved":
        args = ranks, ranks * draw.randint(1, 2), draw.randint(2, 3)
    elif name == "pipedream_2bw":
        args = ranks, draw.randint(ranks, ranks + 2), draw.randint(1, 3)
    else:
        args = ranks, microbatches
    return f"{name}{args}", getattr(schedules, name)(*args)


def layers_of(draw, count, trial):
    """The kinds of layers, among which each stage has one that trains."""
    kinds = [kind for kind in LAYERS if kind != "branch" or trial == "data"]
    names = []
    for _ in range(count):
        name = draw.choice(kinds)
        # A tanh, and an attention's sum, need what they return: nobody may change that.
        if name == "in place" and (not names or names[-1] in ("block", "recompute", "in place")):
            name = "linear"
        names.append(name)
    return [*names, "close"]


# --- a program -----------------------------------------------------------------------------------


class Program:
    def __init__(self, seed, ranks):
        self.draw = draw = random.Random(1000 * ranks + seed)
        self.ranks, self.rank = ranks, dist.get_rank()
        self.name, self.schedule = schedule_of(draw, ranks)
        actions = {action.kind for row in self.schedule for action in row}
        self.updates, self.split = "U" in actions, "I" in actions
        self.trial = draw.choice(["shapes", "shapes", "shapes", "data"])
        stages = self.schedule.virtual_stages
        self.kinds = layers_of(draw, draw.randint(stages, stages + 4), self.trial)
        cuts = [0, *sorted(draw.sample(range(1, len(self.kinds)), stages - 1)), len(self.kinds)]
        self.balance = [end - start for start, end in pairwise(cuts)]
        self.tie = draw.random() < 0.2 and not self.updates
        self.seed, self.done = seed, []
        self.mine, self.plain = self.make(), self.make()
        if self.split:
            self.mine = splittable(self.mine)
            self.plain = splittable(self.plain)  # a name is then one of both
        self.exact = not self.tie
        self.hooks(draw)
        self.numbers = torch.Generator().manual_seed(seed)

    def make(self):
        torch.manual_seed(self.seed)
        layers = [LAYERS[kind]() for kind in self.kinds]
        linear = [layer for layer, kind in zip(layers, self.kinds, strict=True) if kind == "linear"]
        if self.tie and len(linear) > 1:
            linear[-1].module.weight = linear[0].module.weight
        else:
            self.tie = False
        return layers

    def hooks(self, draw):
        """The same on both models; not where the backward is split, in which hooks are others."""
        if self.split:
            return
        for mine, plain, kind in zip(self.mine, self.plain, self.kinds, strict=True):
            if kind == "linear" and draw.random() < 0.3:
                for layer in (mine, plain):
                    layer.module.register_forward_hook(lambda module, args, output: output * 1.5)
                self.done.append("module hook")
            if kind in ("norm", "linear") and draw.random() < 0.3 and not self.tie:
                for layer in (mine, plain):
                    layer.module.bias.register_hook(lambda gradient: gradient * 0.5)
                self.done.append("parameter hook")

    def between(self, pipe):
        """What may stand between two steps. A rank may do it to its own layers only: the others
        are not told."""
        draw = self.draw
        what = draw.choice(
            ["nothing", "freeze", "freeze", "unfreeze", "modes", "train", "zero_grad"]
        )
        first = draw.randint(0, len(self.kinds))  # often it is the first layers that are frozen
        picks = [number < first or draw.random() < 0.3 for number in range(len(self.kinds))]
        own = {id(layer) for stage in pipe.stages.values() for layer in stage.layers}
        everywhere = self.tie or draw.random() < 0.5
        for model in (self.mine, self.plain):
            for layer, pick in zip(model, picks, strict=True):
                if model is self.mine and not everywhere and id(layer) not in own:
                    continue
                if what in ("freeze", "unfreeze") and pick:
                    layer.requires_grad_(what == "unfreeze")
                elif what == "modes" and pick:
                    layer.train(not layer.training)
                elif what == "train":
                    layer.train()
        self.done.append(what)

    def step(self, pipe):
        draw = self.draw
        rows = draw.choice([2, 2, 3, 5])
        mode = draw.choice(["train"] * 4 + ["no_grad", "inference_mode"])
        autocast = draw.random() < 0.25
        self.done.append(f"step({rows}, {mode}{', autocast' * autocast})")
        number = self.schedule.microbatches
        inputs, targets = torch.randn(2, rows * number, WIDTH, generator=self.numbers)
        count = rows * WIDTH * (number // (self.schedule[0][-1].version or 1))
        with (
            getattr(torch, mode)() if mode != "train" else nullcontext(),
            torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(),
        ):
            found = pipe.step(inputs.clone(), targets, count)
            expected = self.one_process(inputs.clone().chunk(number), targets.chunk(number), count)
        if mode == "train" and not self.updates:
            for model in (self.mine, self.plain):
                for param in nn.ModuleList(model).parameters():
                    if param.grad is not None:
                        param.data.sub_(RATE * param.grad)
        wrong = [] if found is None or self.same(found, expected) else ["loss"]
        return wrong + self.differences(pipe)

    def clear(self):
        for model in (self.mine, self.plain):
            nn.ModuleList(model).zero_grad()

    def same(self, found, expected):
        if found is None or expected is None:
            return found is expected
        if self.exact:
            return torch.equal(found, expected)
        return torch.allclose(found, expected, rtol=1e-3, atol=1e-4)

    def differences(self, pipe):
        """The names of this rank's tensors that are not as in one process."""
        wrong = []
        for stage in pipe.stages.values():
            for number, layer in enumerate(stage.layers, stage.first):
                plain = self.plain[number]
                for (name, param), other in zip(
                    layer.named_parameters(), plain.parameters(), strict=True
                ):
                    if not self.same(param.data, other.data):
                        wrong.append(f"{number}.{name}")
                    if not self.same(param.grad, other.grad):
                        wrong.append(f"{number}.{name}.grad")
                for (name, buffer), other in zip(
                    layer.named_buffers(), plain.buffers(), strict=True
                ):
                    if not self.same(buffer, other):
                        wrong.append(f"{number}.{name}")
        return wrong

    def one_process(self, inputs, targets, count):
        if self.updates:
            return self.with_versions(inputs, targets, count)
        total = 0
        for x, y in zip(inputs, targets, strict=True):
            loss = squared_error(nn.Sequential(*self.plain)(x), y) / count
            if loss.requires_grad:
                with torch.autocast("cpu", enabled=False):  # as torch's documentation has it
                    loss.backward()
            total = total + loss.detach()
        return total

    def with_versions(self, inputs, targets, count):
        """The schedule says which version of a stage a micro-batch reads, and when each is made."""
        stages = pipeline.cut(
            [list(layer.parameters()) for layer in self.plain], len(self.balance), self.balance
        )
        stages = [[param for layer in stage for param in layer] for stage in stages]
        versions = [[[param.data for param in stage]] for stage in stages]
        rows = {row[0].stage: [a for a in row if a.kind in "BU"] for row in self.schedule}
        total = 0
        for k, read in enumerate(versions_read(self.schedule)):
            torch.clear_autocast_cache()  # which knows the weights that were there
            for stage, its, version in zip(stages, versions, read, strict=True):
                for param, data in zip(stage, its[version], strict=True):
                    param.data = data
            loss = squared_error(nn.Sequential(*self.plain)(inputs[k]), targets[k]) / count
            if loss.requires_grad:
                with torch.autocast("cpu", enabled=False):  # as torch's documentation has it
                    loss.backward()
            total = total + loss.detach()
            for number, (stage, its) in enumerate(zip(stages, versions, strict=True)):
                for param, data in zip(stage, its[-1], strict=True):
                    param.data = data
                place = next(i for i, a in enumerate(rows[number]) if a.microbatch == k)
                if rows[number][place + 1 : place + 2] and rows[number][place + 1].kind == "U":
                    for param in stage:
                        if param.grad is not None:
                            param.data = param.data.add(param.grad, alpha=-RATE)
                            param.grad = None
                    its.append([param.data for param in stage])
        return total


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def programs(seeds, ranks):
    """On a rank: the programs that are not as in one process, as (seed, what has been done, what is
    wrong)."""
    group, wrong = first_ranks(ranks), []
    for seed in seeds:
        if dist.get_rank() >= ranks:
            pipeline.join_group_creation()
            continue
        program = Program(seed, ranks)
        with pipeline.Pipeline(
            program.mine,
            program.schedule,
            squared_error,
            balance=program.balance,
            group=group,
            optimizer=sgd if program.updates else None,
            trial=program.trial,
        ) as pipe:
            for _ in range(STEPS):
                program.between(pipe)
                if program.done[-1] == "zero_grad" or program.updates or program.tie:
                    program.clear()
                found = program.step(pipe)
                if found and seed not in (one[0] for one in wrong):
                    wrong.append(
                        (
                            seed,
                            program.name,
                            program.kinds,
                            program.balance,
                            program.trial,
                            tuple(program.done),
                            found,
                        )
                    )
            dist.barrier(group)
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_programs(five, ranks, first):
    assert five.call(programs, range(first, first + 10), ranks) == [[]] * 5
