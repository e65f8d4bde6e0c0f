"""Hooks, subclasses and parametrizations under schedules that split the backward: on real ranks
what one process makes of them, or refused before anything is sent."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_loop import squared_error
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations, prune, spectral_norm

from naranhi import pipeline, schedules
from naranhi.autograd import Recompute, splittable
from naranhi.schedules import Schedule
from naranhi.zero import Zero

WIDTH, MICROBATCHES = 8, 4


def split_up(schedule):
    """With an I and a W, one after the other, for every B."""
    return Schedule(
        [
            part
            for action in row
            for part in (
                [action] if action.kind != "B" else [action._replace(kind=kind) for kind in "IW"]
            )
        ]
        for row in schedule
    )


SCHEDULES = {
    "h1": schedules.zero_bubble_h1,
    "h2": schedules.zero_bubble_h2,
    "interleaved": lambda p, m: split_up(schedules.interleaved(p, m, 2)),
    "gpipe": lambda p, m: split_up(schedules.gpipe(p, m)),
}


class Double(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Block(nn.Module):
    """Attention with keyword arguments, and an MLP whose first weight is read by the block."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(x, key=x, value=x, need_weights=False)[0]
        return x + self.down(self.up(x).tanh()) * self.up.weight.detach().norm()


def make(notes, wrap=lambda layer: layer):
    """Eight layers. notes: {layer's number: [what a hook has seen, in order]}, to be added to."""
    torch.manual_seed(0)

    def note(number, change=None):
        seen = []
        notes.setdefault(number, []).append(seen)

        def hook(*args):
            tensors = [
                one
                for arg in args
                for one in (arg if isinstance(arg, tuple) else (arg,))
                if isinstance(one, torch.Tensor)
            ]
            if not any(isinstance(one, FakeTensor) for one in tensors):
                seen.append([one.detach().clone() for one in tensors])
            return change(args[-1]) if change else None

        return hook

    layers = [
        Block(),
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
        spectral_norm(nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH)),
        Double(WIDTH, WIDTH),
        prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.5),
        nn.Linear(WIDTH, WIDTH),
        Block(),
    ]
    layers[0].up.register_forward_hook(note(0, lambda y: y * 2))
    layers[0].down.register_full_backward_pre_hook(note(0, lambda grads: (grads[0] * 2,)))
    layers[1].linear1.weight.register_hook(note(1, lambda grad: grad.clamp(-0.01, 0.01)))
    after = note(1)
    layers[1].norm1.weight.register_post_accumulate_grad_hook(
        lambda param: after(param.grad.mul_(0.5))
    )
    layers[2].bias.register_hook(note(2, lambda grad: grad * 3))
    layers[3][1].register_full_backward_hook(note(3))
    layers[3][1].bias.register_hook(note(3))
    layers[4].register_forward_pre_hook(note(4, lambda args: (args[0] * 2,)))
    layers[5].register_full_backward_hook(note(5))
    layers[6].weight.register_hook(note(6, lambda grad: grad.clamp(-0.1, 0.1)))
    layers[7].attention.out_proj.weight.register_hook(note(7, lambda grad: grad * 2))
    layers[7].attention.register_full_backward_hook(note(7))
    return [wrap(layer) for layer in layers]


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3 * MICROBATCHES, 5, WIDTH, generator=generator)


def beside_one_process(ranks, schedule, wrap):
    """On a rank: by layer what differs in any bit from one process, "notes" or a parameter."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        pipeline.join_group_creation()
        return None
    wrap = Recompute if wrap else (lambda layer: layer)
    expected_notes, notes = {}, {}
    expected = make(expected_notes, wrap)
    inputs, targets = batch()
    for x, target in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        (squared_error(nn.Sequential(*expected)(x), target) / 7).backward()
    layers, found = splittable(make(notes, wrap)), {}
    with pipeline.Pipeline(layers, schedule, squared_error, group=group) as pipe:
        pipe.step(inputs, targets, 7)
        for stage in pipe.stages.values():
            for number, layer in enumerate(stage.layers, stage.first):
                names = zip(layer.named_parameters(), expected[number].parameters(), strict=True)
                wrong = [
                    name
                    for (name, param), other in names
                    if not torch.equal(param.grad, other.grad)
                ]
                wrong += ["notes"] * (not same(notes.pop(number), expected_notes[number]))
                if wrong:
                    found[number] = wrong
    assert not any(seen for hooks in notes.values() for seen in hooks), "of another rank's layer"
    return found


def same(notes, expected):
    """Whether hooks were called as often, for each micro-batch, and saw the same bits. Recomputed
    forwards, which come at other times than in one process, are only counted."""
    assert {len(seen) for seen in expected} <= {MICROBATCHES, 2 * MICROBATCHES}
    return [len(seen) for seen in notes] == [len(seen) for seen in expected] and all(
        torch.equal(one, other)
        for seen, should in zip(notes, expected, strict=True)
        if len(should) == MICROBATCHES
        for tensors, others in zip(seen, should, strict=True)
        for one, other in zip(tensors, others, strict=True)
    )


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_hooks_and_parametrizations_are_those_of_one_process(five, ranks, name, wrap):
    schedule = SCHEDULES[name](ranks, MICROBATCHES)
    assert five.call(beside_one_process, ranks, schedule, wrap)[:ranks] == [{}] * ranks


def halve(param):
    param.grad.mul_(0.5)


def with_versions(hooked):
    """On a rank: weights after some updates; with hooks that halve gradients at twice the rate."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        pipeline.join_group_creation()
        return None
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    for layer in layers if hooked else []:
        layer.weight.register_hook(lambda grad: grad * 0.5)
        layer.bias.register_post_accumulate_grad_hook(halve)
    with pipeline.Pipeline(
        layers,
        schedules.pipedream(2, MICROBATCHES),
        squared_error,
        group=group,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02 if hooked else 0.01),
    ) as pipe:
        pipe.step(*batch(), 7)
        return [param.tolist() for param in pipe.parameters()]


def test_hooks_of_parameters_that_have_versions(five):
    assert five.call(with_versions, True) == five.call(with_versions, False)


# --- what is refused, on every rank, before anything is sent -------------------------------------


def hooked(case):
    layers = splittable([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    if case == "old":
        layers[3].register_backward_hook(lambda *_: None)
    else:
        layers[2] = Stranger(nn.Parameter(torch.ones(WIDTH)))
        splittable(layers)
    return layers


class Stranger(nn.LayerNorm):
    """Uses a weight that it does not register."""

    def __init__(self, weight):
        super().__init__(WIDTH)
        self.others = [weight]

    def forward(self, x):
        return super().forward(x) * self.others[0]


def failure(case):
    """On a rank: the error of a step."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        pipeline.join_group_creation()
        return None
    x, _ = batch()
    schedule = schedules.zero_bubble_h1(2, MICROBATCHES)
    with pipeline.Pipeline(hooked(case), schedule, squared_error, group=group) as pipe:
        try:
            pipe.step(x, x, 1)
        except (TypeError, ValueError) as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "case, words",
    [
        ("old", "layer 3 (Linear) has a hook of register_backward_hook"),
        ("stranger", "layer 2 (Stranger) uses a tensor of shape (8,) that requires a gradient"),
    ],
)
def test_hooks_that_cannot_be_are_refused_on_every_rank(five, case, words):
    for told in five.call(failure, case)[:2]:
        assert words in told


# --- units of ZeRO -------------------------------------------------------------------------------


def sharded(stage, wrap, named):
    """How far weights are from one process's after three steps, with a hook on a parameter. named:
    whether the units are named as the modules that they were before they were such layers."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    wraps = {
        "splittable": lambda layers: splittable(layers),
        "recomputed": lambda layers: [Recompute(layer) for layer in layers],
        "both": lambda layers: splittable([Recompute(layer) for layer in layers]),
    }
    models = []
    for prepare in (list, wraps[wrap]):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), Maybe(), nn.Linear(WIDTH, WIDTH)]
        layers[0].weight.register_hook(lambda grad: grad * 0.5)
        models.append(nn.Sequential(*prepare(layers)))
    plain, model = models
    zero = Zero(model, stage, units=layers if named else None, group=group)
    steppers = [
        torch.optim.SGD(plain.parameters(), lr=0.1),
        torch.optim.SGD(zero.param_groups, lr=0.1),
    ]
    for step in range(3):
        x, target = batch()[:, step::3]
        own = slice(rank, None, 2)
        steppers[0].zero_grad()
        (squared_error(plain(x), target) / 100).backward()
        (squared_error(model(x[own]), target[own]) / 100).backward()
        steppers[0].step()
        zero.step(steppers[1])
    with zero.gathered():
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return max((param - other).abs().max().item() for param, other in pairs)


class Maybe(nn.Module):
    """Has a norm that it does not use, besides one that it does."""

    def __init__(self):
        super().__init__()
        self.norm, self.idle = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.norm(x) * self.scale


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("wrap", ["splittable", "recomputed", "both"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_units_of_zero_may_be_such_layers(five, stage, wrap, named):
    assert max(five.call(sharded, stage, wrap, named)[:2]) <= 1e-6
