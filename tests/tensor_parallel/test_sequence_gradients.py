"""Gradients of what is replicated along the sequence, whoever takes them: to one process's."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn

from naranhi import models, pipeline, schedules
from naranhi.autograd import Recompute, splittable
from naranhi.data_parallel import DDP, all_reduce_bucketed
from naranhi.tensor_parallel import (
    Column,
    Row,
    SequenceParallel,
    full_state_dict,
    gpt2_plan,
    parallelize,
    sum_sequence_gradients,
    vocabulary_cross_entropy,
)
from naranhi.zero import Zero

WORDS, LENGTH, STEPS, RATE = 51, 8, 3, 0.1
_groups = []


def groups():
    """(tensor group, data group) of this rank, on a mesh of two times two; None beyond it."""
    rank = dist.get_rank()
    if not _groups:
        _groups.extend(dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]))
    tensor, shares = _groups[rank // 2 % 2], _groups[2 + rank % 2]
    return (tensor, shares) if rank < 4 else None


def gpt2():
    """Norms and biases are not what they start with, 1 and 0."""
    torch.manual_seed(0)
    layers = models.gpt2(models.gpt2_config(WORDS, LENGTH, 16, 4, 2), True, 0.0)
    for param in nn.ModuleList(layers).parameters():
        if param.dim() == 1:
            param.data.normal_(1.0, 0.3)
    return layers


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (4, LENGTH), generator=generator)


def optimizer(params):
    return torch.optim.SGD(params, lr=RATE)


def one_process():
    model = nn.Sequential(*gpt2())
    stepper = optimizer(model.parameters())
    for step in range(STEPS):
        stepper.zero_grad()
        tokens = batch(step)
        (models.loss(model(tokens), tokens.roll(-1, 1)) / tokens.numel()).backward()
        stepper.step()
    return model


def trained(way, wrap, calls):
    """How far weights are from one process's after three steps, on two replicas of two ranks.

    calls: whether `sum_sequence_gradients` is called, which ZeRO and `DDP` do not need.
    """
    if not (place := groups()):
        return None
    tensor, shares = place
    layers = parallelize(gpt2(), gpt2_plan(), tensor, sequence=True)
    wraps = {
        "": list,
        "recompute": lambda layers: [Recompute(layer) for layer in layers],
        "split": splittable,
    }
    model = nn.Sequential(*wraps[wrap](layers))
    zero = Zero(model, int(way[-1]), group=shares) if way.startswith("zero") else None
    parallel = DDP(model, shares, bucket_bytes=2000) if way == "overlapped" else None
    stepper = optimizer(zero.param_groups if zero else model.parameters())

    def backward(tokens):
        loss = vocabulary_cross_entropy(model(tokens), tokens.roll(-1, 1), tensor)
        (loss / (4 * LENGTH)).backward()

    for step in range(STEPS):
        first, second = batch(step).chunk(2)[dist.get_rank(shares)].chunk(2)
        (zero or stepper).zero_grad()
        with (zero or parallel).no_sync() if zero or parallel else nullcontext():
            backward(first)
        backward(second)
        if not (zero or parallel):
            all_reduce_bucketed(model, shares)
        if calls:
            sum_sequence_gradients(model)
        zero.step(stepper) if zero else stepper.step()
    expected = nn.ModuleList(one_process()).state_dict()
    if zero:
        zero.close()  # whose weights are whole then
    state = full_state_dict(layers)
    return max((state[name] - weight).abs().max().item() for name, weight in expected.items())


@pytest.mark.parametrize(
    "way, wrap, calls",
    [
        ("plain", "", True),
        ("overlapped", "", True),
        ("overlapped", "", False),
        ("zero 1", "", True),
        ("zero 1", "", False),
        ("zero 2", "", True),
        ("zero 2", "", False),
        ("zero 3", "", True),
        ("zero 3", "", False),
        ("zero 3", "recompute", False),
        ("zero 2", "split", False),
        ("plain", "recompute", True),
    ],
)
def test_weights_are_those_of_one_process(five, way, wrap, calls):
    assert max(five.call(trained, way, wrap, calls)[:4]) <= 1e-6


# --- to the bit ----------------------------------------------------------------------------------


def integers(*shape):
    """Small whole numbers as floats: their sums of products are exact in any order."""
    return torch.randint(-4, 5, shape).float()


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.wpe = nn.Embedding(LENGTH, 6)

    def forward(self, x):
        return x + self.wpe(torch.arange(LENGTH))


def whole_numbers():
    torch.manual_seed(0)
    model = nn.Sequential(Positions(), nn.Linear(6, 8), nn.Linear(8, 6))
    for param in model.parameters():
        param.data = integers(*param.shape)
    return model


PLAN = {"0.wpe": SequenceParallel(), "1": Column(), "2": Row()}


def exact(way):
    """On a rank: the names of the parameters that are not one process's, to the bit."""
    if not (place := groups()):
        return None
    tensor, shares = place
    plain, model = whole_numbers(), whole_numbers()
    x, grad = integers(4, LENGTH, 6), integers(4, LENGTH, 6)
    plain(x).backward(grad)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    parallelize(model, PLAN, tensor, sequence=True)
    zero = Zero(model, int(way[-1]), group=shares) if way.startswith("zero") else None
    parallel = DDP(model, shares) if way == "overlapped" else None
    own = [
        tensor_.chunk(2)[dist.get_rank(shares)].chunk(2, 1)[dist.get_rank(tensor)]
        for tensor_ in (x, grad)
    ]
    stepper = torch.optim.SGD(zero.param_groups if zero else model.parameters(), lr=1.0)
    model(own[0]).backward(own[1])
    if not (zero or parallel):
        all_reduce_bucketed(model, shares)
    sum_sequence_gradients(model)
    zero.step(stepper) if zero else stepper.step()
    if zero:
        zero.close()
    state = full_state_dict(model)
    return [
        name for name, weight in plain.state_dict().items() if not torch.equal(state[name], weight)
    ]


@pytest.mark.parametrize("way", ["plain", "overlapped", "zero 1", "zero 2", "zero 3"])
def test_whole_numbers_are_equal_to_the_bit(five, way):
    assert five.call(exact, way)[:4] == [[]] * 4


# --- hooks, messages, and what is refused --------------------------------------------------------


def hooked():
    """What a hook on a norm sees in two backwards, of the unsplit model and of the cut one."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    seen = {False: [], True: []}
    grads = []
    for cut in (False, True):
        layers = gpt2()
        if cut:
            parallelize(layers, gpt2_plan(), group, sequence=True)
        norm, model = layers[1].block.ln_2, nn.Sequential(*layers)
        norm.weight.register_hook(lambda grad, cut=cut: seen[cut].append(grad) or grad * 0.5)
        norm.bias.register_post_accumulate_grad_hook(
            lambda bias, cut=cut: seen[cut].append(bias.grad.clone())
        )
        for step in range(2):
            tokens = batch(step)
            loss = (
                models.loss(model(tokens), tokens)
                if not cut
                else vocabulary_cross_entropy(model(tokens), tokens, group)
            )
            loss.backward()
        if cut:
            sum_sequence_gradients(model)
        grads.append([norm.weight.grad, norm.bias.grad, layers[1].block.ln_1.weight.grad])
    torch.testing.assert_close(seen[True], seen[False], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


def test_a_hook_sees_the_whole_gradient_of_each_backward(five):
    five.call(hooked)


def messages():
    """How many all-reduces a backward of two micro-batches and `sum_sequence_gradients` take."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    counts, reduce = [], dist.all_reduce

    def counted(*args, **kwargs):
        counts[-1] += 1
        return reduce(*args, **kwargs)

    for listens in (False, True):
        layers = parallelize(gpt2(), gpt2_plan(), group, sequence=True)
        if listens:
            layers[1].block.ln_1.weight.register_hook(lambda grad: None)
        for step in range(2):
            tokens = batch(step)
            loss = vocabulary_cross_entropy(nn.Sequential(*layers)(tokens), tokens, group)
            counts.append(0)
            dist.all_reduce = counted
            try:
                loss.backward()
            finally:
                dist.all_reduce = reduce
        counts.append(0)
        dist.all_reduce = counted
        try:
            sum_sequence_gradients(layers)
        finally:
            dist.all_reduce = reduce
    return counts


def test_there_is_one_message_a_step_unless_hooks_listen(five):
    for counts in five.call(messages)[:2]:
        assert counts == [0, 0, 1, 1, 1, 1]


def refused():
    """The messages of what is refused, by what is wrong."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    told = {}

    def attempt(what, function, *args):
        with pytest.raises(RuntimeError) as error:
            function(*args)
        told[what] = str(error.value)

    def backward(model, tokens):
        vocabulary_cross_entropy(model(tokens), tokens, group).backward()

    layers = parallelize(gpt2(), gpt2_plan(), group, sequence=True)
    model = nn.Sequential(*layers)
    attempt("no backward", sum_sequence_gradients, model)
    backward(model, batch(0))
    layers[1].block.ln_1.weight.register_hook(lambda grad: None)
    attempt("hook after it", sum_sequence_gradients, model)
    attempt("hook between two", backward, model, batch(1))
    model.zero_grad()
    backward(model, batch(1))
    sum_sequence_gradients(model)
    sum_sequence_gradients(nn.Sequential(nn.Linear(2, 2)))  # nothing to do
    return told


def test_gradients_that_cannot_be_summed_are_refused(five):
    first, second = five.call(refused)[:2]
    assert first == second
    expected = {
        "no backward": "has a gradient to be summed: call sum_sequence_gradients after the backw",
        "hook after it": "1.block.ln_1.weight got a hook after its backward",
        "hook between two": "1.block.ln_1.weight got a hook between two backwards of one step",
    }
    assert first.keys() == expected.keys()
    for what, words in expected.items():
        assert words in first[what], first[what]


def zero_clip(stage, sequence):
    """By norm type: the norm that `Zero.clip_grad_norm_` finds of tensor-parallel shards, and after
    clipping to half of it, both over one process's."""
    if not (place := groups()):
        return None
    tensor, shares = place
    unsplit, tokens = nn.Sequential(*gpt2()).double(), batch(0)
    (models.loss(unsplit(tokens), tokens.roll(-1, 1)) / tokens.numel()).backward()
    gradients = [param.grad for param in unsplit.parameters()]
    layers = nn.ModuleList(gpt2()).double()
    model = nn.Sequential(*parallelize(list(layers), gpt2_plan(), tensor, sequence=sequence))
    zero, found = Zero(model, stage, group=shares), {}
    own = tokens.chunk(2)[dist.get_rank(shares)]
    for kind in (2.0, 1.0, math.inf):
        loss = vocabulary_cross_entropy(model(own), own.roll(-1, 1), tensor)
        (loss / tokens.numel()).backward()
        norm = nn.utils.get_total_norm(gradients, kind).item()
        before = zero.clip_grad_norm_(norm / 2, kind)
        zero.clip_grad_norm_(1e30, kind)  # which changes nothing
        found[kind] = before / norm, 2 * zero.clip_grad_norm_(1e30, kind) / norm
        zero.zero_grad()
    zero.close()
    return found


@pytest.mark.parametrize("stage, sequence", [(1, False), (2, True), (3, False), (3, True)])
def test_zero_clips_to_the_norm_of_the_whole_model(five, stage, sequence):
    """What a tensor group holds whole counts once, what it holds in parts with all of them."""
    for found in five.call(zero_clip, stage, sequence)[:4]:
        for before, after in found.values():
            assert before == pytest.approx(1, rel=1e-6)
            assert after == pytest.approx(1, rel=1e-4)  # scaled by max_norm / (norm + 1e-6)


class Named(nn.Module):
    """Has an attribute that sequence parallelism might take for its own."""

    def __init__(self):
        super().__init__()
        self.sequence, self.group = nn.Sequential(nn.Linear(4, 4)), "a group of its own"
        self.weight = nn.Parameter(torch.ones(4))


def names():
    model = nn.ModuleList([Named(), nn.LayerNorm(4)])
    sum_sequence_gradients(model)
    return [param.grad for param in model.parameters()]


def test_attributes_of_the_same_name_mean_nothing(five):
    assert five.call(names)[0] == [None] * 5


def in_a_pipeline(schedule):
    """Hooks on replicated parameters under a schedule: how far gradients are from the unsplit's."""
    if not (place := groups()):
        pipeline.join_group_creation()
        return None
    tensor, along = place
    unsplit, layers = gpt2(), parallelize(gpt2(), gpt2_plan(), tensor, sequence=True)
    for block in (1, 2):
        for model in (unsplit, layers):
            model[block].block.ln_1.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    tokens = torch.cat([batch(0), batch(1)])
    for part in tokens.chunk(4):
        (models.loss(nn.Sequential(*unsplit)(part), part) / tokens.numel()).backward()
    layers = splittable(layers)

    def loss(logits, targets):
        return vocabulary_cross_entropy(logits, targets, tensor)

    with pipeline.Pipeline(layers, schedule, loss, group=along) as pipe:
        pipe.step(tokens, tokens, tokens.numel())
        stages = nn.ModuleList(pipe.stages.values())
        sum_sequence_gradients(stages)
        apart = []
        for stage in pipe.stages.values():
            for number, layer in enumerate(stage.layers, stage.first):
                others = dict(unsplit[number].named_parameters())
                apart += [
                    (param.grad - others[name].grad).abs().max().item()
                    for name, param in layer.named_parameters()
                    if "ln_" in name
                ]
    return max(apart)


def test_hooks_under_a_schedule_that_splits_the_backward(five):
    found = five.call(in_a_pipeline, schedules.zero_bubble_h1(2, 4))[:4]
    assert max(found) <= 1e-6
