"""Every schedule on real ranks: gradients to the bit, weights of any age, and what is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_loop import differences, squared_error
from torch import nn
from torch.func import functional_call

from naranhi import models, pipeline, schedules
from naranhi.autograd import Recompute, Splittable, splittable
from naranhi.schedules import Schedule

FLUSHED = {
    "1f1b": schedules.one_f_one_b,
    "interleaved 2": lambda p, m: schedules.interleaved(p, m, 2),
    "interleaved 4": lambda p, m: schedules.interleaved(p, m, 4),
    "h1": schedules.zero_bubble_h1,
    "h2": schedules.zero_bubble_h2,
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FLUSHED)
def test_gradients_are_the_plain_loops_to_the_bit(five, ranks, name):
    prepare = splittable if name.startswith("h") else list
    blocks = 8 if name != "interleaved 4" else 16
    found = five.call(
        differences, ranks, FLUSHED[name](ranks, 8), "mlp", None, 1, (blocks,), prepare
    )
    assert found == [{}] * 5
    if name != "interleaved 4":  # more stages than a GPT-2 of three blocks has layers
        balance = (2, 1, 1, 1) if name == "interleaved 2" else None
        found = five.call(differences, 2, FLUSHED[name](2, 4), "gpt2", balance, 2, (), prepare)
        assert found == [{}] * 5


@pytest.mark.parametrize("name", ["1f1b", "h1", "h2"])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_fewer_micro_batches_than_stages(five, name, microbatches):
    found = five.call(
        differences, 4, FLUSHED[name](4, microbatches), "mlp", None, 1, (), splittable
    )
    assert found == [{}] * 5


def test_a_tied_parameter_with_a_split_backward(five):
    found = five.call(
        differences, 2, schedules.zero_bubble_h1(2, 4), "tied gpt2", None, 1, (), splittable
    )
    tied = {(0, 0), (4, 2)}
    for wrong in found:
        assert wrong.keys() <= tied
        assert all(gap <= 1e-6 for gap in wrong.values())


# --- weights in versions -------------------------------------------------------------------------

WIDTH, ROWS, RATE, MOMENTUM = 8, 3, 0.05, 0.9


def work(ranks, microbatches):
    torch.manual_seed(0)
    layers = models.mlp(ranks, WIDTH)
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(2, ROWS * microbatches, WIDTH, generator=generator)
    return layers, inputs, targets


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def delayed_loop(ranks, each, updates, age, steps):
    """The weights, by stage, of one process: micro-batch k of a step reads at stage s the version
    age(k, s) since it began, and after every `each` micro-batches each stage has a new one."""
    layers, inputs, targets = work(ranks, each * updates)
    optimizers = [sgd(list(layer.parameters())) for layer in layers]
    for _ in range(steps):
        found = delayed_step(layers, optimizers, inputs, targets, each, age)
    return found


def delayed_step(layers, optimizers, inputs, targets, each, age):
    def snapshot(layer):
        return {name: one.detach().clone() for name, one in layer.named_parameters()}

    ranks, versions = len(layers), [[snapshot(layer)] for layer in layers]
    for k, (x, y) in enumerate(zip(inputs.split(ROWS), targets.split(ROWS), strict=True)):
        read = [
            {name: one.requires_grad_() for name, one in versions[s][age(k, s)].items()}
            for s in range(ranks)
        ]
        for layer, weights in zip(layers, read, strict=True):
            x = functional_call(layer, weights, (x,))
        found = torch.autograd.grad(
            squared_error(x, y) / (ROWS * each * WIDTH),
            [one for weights in read for one in weights.values()],
        )
        own = [parameter for layer in layers for parameter in layer.parameters()]
        for parameter, gradient in zip(own, found, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if (k + 1) % each == 0:
            for layer, optimizer, older in zip(layers, optimizers, versions, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                older.append(snapshot(layer))
    return [list(one[-1].values()) for one in versions]


class CountVersions:
    """A recorder: how many versions the rank holds after each action."""

    def __init__(self, pipe):
        (self.stage,), self.held = pipe.stages.values(), []

    def begin(self):
        pass

    def end(self, action):
        self.held.append((str(action), self.stage.weights.held))


def trained(ranks, schedule, each, updates, age, steps=1, stash=True, prepare=list):
    """By rank: whether the weights are the loop's to the bit, how far off they are, and how many
    versions were held after each action."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return pipeline.join_group_creation()
    layers, inputs, targets = work(ranks, each * updates)
    expected = delayed_loop(ranks, each, updates, age, steps)[rank]
    with pipeline.Pipeline(
        prepare(layers), schedule, squared_error, group=group, optimizer=sgd, stash=stash
    ) as pipe:
        for _ in range(steps):
            counter = CountVersions(pipe)
            pipe.step(inputs, targets, ROWS * each * WIDTH, counter)
        found = list(pipe.parameters())
    equal = all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    gap = max((one - two).abs().max().item() for one, two in zip(found, expected, strict=True))
    return equal, gap, counter.held


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pipedream_reads_what_a_loop_with_its_delays_reads(five, ranks):
    found = five.call(trained, ranks, schedules.pipedream(ranks, 20), 1, 20, pipedream_age(ranks))
    for rank, (equal, _, held) in enumerate(found[:ranks]):
        assert equal
        steady = [count for name, count in held[6 * ranks : -6 * ranks] if "B" not in name]
        assert set(steady) == {ranks - rank}


class pipedream_age:
    """A function that can be sent to a rank."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __call__(self, k, stage):
        return max(0, k - (self.ranks - 1 - stage))


class two_buffered_age:
    def __init__(self, each, delay):
        self.each, self.delay = each, delay

    def __call__(self, k, stage):
        return max(0, k // self.each - self.delay)


@pytest.mark.parametrize("ranks, each, delay", [(2, 2, 1), (4, 4, 1), (3, 5, 1), (4, 2, 2)])
def test_2bw_reads_what_a_loop_with_one_delay_reads(five, ranks, each, delay):
    schedule = schedules.pipedream_2bw(ranks, each, 20)
    age = two_buffered_age(each, delay)
    for equal, _, held in five.call(trained, ranks, schedule, each, 20, age)[:ranks]:
        assert equal
        assert max(count for _, count in held) == 1 + delay  # three, where m is below p


def recomputed(layers):
    return [Recompute(layer) for layer in layers]


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


@pytest.mark.parametrize(
    "prepare, change", [(list, Schedule), (recomputed, Schedule), (splittable, split_up)]
)
def test_a_second_step_goes_on_from_the_newest_weights(five, prepare, change):
    """Also where a backward computes a forward again, and where it is split: with what weights
    it reads meanwhile."""
    schedule = change(schedules.pipedream(3, 8))
    found = five.call(trained, 3, schedule, 1, 8, pipedream_age(3), 2, True, prepare)
    assert [equal for equal, _, _ in found[:3]] == [True] * 3


def without_weights():
    """What a rank holds after each action, where the middle one of three has only a ReLU."""
    group, rank = first_ranks(3), dist.get_rank()
    if rank >= 3:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    layers, x = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)], torch.ones(5, 4)
    before = [one.clone() for one in layers[rank].parameters()]
    with pipeline.Pipeline(
        layers, schedules.pipedream(3, 5), squared_error, group=group, optimizer=sgd
    ) as pipe:
        pipe.step(x, -x, 20)
        return [
            not torch.equal(one, two) for one, two in zip(pipe.parameters(), before, strict=True)
        ]


def test_a_stage_without_weights_has_nothing_to_update(five):
    assert five.call(without_weights) == [[True, True], [], [True, True], None, None]


def test_without_stashing_the_gradients_are_wrong(five):
    found = five.call(trained, 3, schedules.pipedream(3, 20), 1, 20, pipedream_age(3), 1, False)
    for rank, (equal, gap, held) in enumerate(found[:3]):
        assert {count for _, count in held} == {1}
        assert not equal
        assert gap > 1e-5, rank


# --- bad input -----------------------------------------------------------------------------------


class Own(nn.Module):
    """Has a weight of its own besides that of a layer within."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * self.scale


def failure(case):
    group, rank = first_ranks(2), dist.get_rank()
    layers = models.mlp(2, WIDTH)
    options, schedule = {}, schedules.pipedream(2, 4)
    if case == "whole":
        schedule = schedules.zero_bubble_h1(2, 4)
    elif case == "bound":
        options = {"optimizer": sgd, "versions": 1}
    elif case == "chunks":
        layers, schedule = models.mlp(7, WIDTH), schedules.interleaved(2, 4, 2)
    elif case == "tied":
        layers[1].down = layers[0].down
        options = {"optimizer": sgd}
    elif case == "tied on a rank":
        layers = models.mlp(4, WIDTH)
        layers[3].down = layers[0].down
        options = {"optimizer": sgd}
        schedule = Schedule(["0F0 3F0 3B0 3U1 0B0 0U1", "1F0 2F0 2B0 2U1 1B0 1U1"])
    try:
        if rank >= 2:
            pipeline.join_group_creation()
        else:
            pipeline.Pipeline(layers, schedule, squared_error, group=group, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "case, words",
    [
        (
            "whole",
            "0I0 cannot be run: layer 0 (MLPBlock) cannot split its backward, as the gradient of "
            "up.weight cannot be left for later",
        ),
        ("no optimizer", "0U1 cannot be run: it needs an optimizer"),
        ("bound", "rank 0 holds 2 versions of stage 0's weights after 0U1"),
        ("chunks", "7 layers cannot be divided into 4 chunks of one size, 2 on each rank"),
        ("tied", "stages 0 and 1 share a tied parameter"),
        ("tied on a rank", "stages 0 and 3 share a tied parameter"),
    ],
)
def test_bad_input_is_refused_on_every_rank(five, case, words):
    for told in five.call(failure, case):
        assert words in told


def test_a_module_with_weights_of_its_own_is_split_as_a_whole():
    torch.manual_seed(0)
    plain = nn.Sequential(Own(), nn.ReLU())
    x = torch.randn(5, WIDTH, requires_grad=True)
    plain(x).sum().backward()
    expected, x.grad = [x.grad, *(one.grad for one in plain.parameters())], None
    for one in plain.parameters():
        one.grad = None
    (split,) = splittable([plain])
    later = []
    assert isinstance(split[0], Splittable)
    split[0].defer = later.append
    split(x).sum().backward()
    assert torch.equal(x.grad, expected[0])
    assert [one.grad for one in split.parameters()] == [None] * 3
    for add in later:
        add()
    for one, gradient in zip(split.parameters(), expected[1:], strict=True):
        assert torch.equal(one.grad, gradient)


class Shift(nn.Module):
    """Autograd finds one tensor for the gradients of `x`, `one` and `two`, and for that of `sum` a
    number that is seen as many."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.sum = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(3))

    def forward(self, x):
        return x + self.one + self.two + self.sum.sum()


def test_gradients_left_for_later_share_no_storage():
    """One that is added to would change the others, and that of x may be under way."""
    plain, split = Shift(), Splittable(Shift())
    sent = []
    for k in range(3):
        x = torch.zeros(WIDTH, requires_grad=True)
        (plain(x) * k).sum().backward()
        later, x = [], torch.zeros(WIDTH, requires_grad=True)
        split.defer = later.append
        (split(x) * k).sum().backward()
        sent.append(x.grad)
        for add in later:
            add()
    for one, expected in zip(split.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, expected.grad)
    assert [one.unique().tolist() for one in sent] == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("shape", [(WIDTH,), (5, WIDTH), (2, 3, WIDTH)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_split_to_the_bit(shape, bias):
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, 3, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    plain(x).square().sum().backward()
    expected, x.grad = [x.grad, *(one.grad for one in plain.parameters())], None
    (split,) = splittable([plain])
    for defer in (False, True):
        later = []
        split.defer = later.append if defer else None
        split.zero_grad()
        x.grad = None
        split(x).square().sum().backward()
        for add in later:
            add()
        found = [x.grad, *(one.grad for one in split.parameters())]
        assert len(later) == defer
        for one, gradient in zip(found, expected, strict=True):
            assert torch.equal(one, gradient)
            assert one.grad_fn is None


def group_norms():
    """On a rank: whether gradients are one process's, of group norms in channels_last."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.GroupNorm(1, 3), nn.ReLU()) for _ in range(4)]
    layers = [block.to(memory_format=torch.channels_last) for block in blocks]
    alone, x = nn.Sequential(*copy.deepcopy(layers)), torch.randn(6, 3, 4, 4)
    for part in x.chunk(3):
        squared_error(alone(part), part).backward()
    options = {"group": group, "balance": [2, 2]}
    layers = splittable(layers)
    with pipeline.Pipeline(layers, schedules.zero_bubble_h1(2, 3), squared_error, **options) as own:
        own.step(x, x, 1)
        dist.barrier(group)
        given = nn.ModuleList(layers).parameters()
        pairs = [
            pair for pair in zip(given, alone.parameters(), strict=True) if pair[0].grad is not None
        ]
        return len(pairs), all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_split_backward_of_a_group_norm_in_channels_last(five):
    """With which torch crashes where it is asked for the gradients of the weights alone."""
    assert five.call(group_norms)[:2] == [(8, True)] * 2
