"""Tensor parallelism on real ranks, against the unsplit model in one process."""

import copy
from collections import Counter
from itertools import product

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from naranhi import models, pipeline, schedules
from naranhi.autograd import Recompute, splittable
from naranhi.pipeline import shape_inference
from naranhi.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_group,
    full_state_dict,
    gather_from_group,
    gather_from_sequence,
    gpt2_plan,
    load_full_state_dict,
    mlp_plan,
    parallelize,
    reduce_from_group,
    reduce_scatter_to_sequence,
    scatter_to_group,
    sum_sequence_gradients,
    vocabulary_cross_entropy,
)
from naranhi.tensor_parallel import layers as tensor_layers

WORDS, LENGTH, BLOCKS = 51, 8, 2  # no number of ranks divides the words
BOUND = 1e-6


def integers(*shape):
    """Small whole numbers as floats: their sums of products are exact in any order."""
    return torch.randint(-4, 5, shape).float()


# --- the ways in and out -------------------------------------------------------------------------


def pairs(ranks):
    """Each way into the region and out of it, on whole numbers, by what it should do."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return
    torch.manual_seed(0)
    xs, whole = integers(ranks, 2, 12, 5), integers(2, 12, 5)  # every rank's, on every rank
    part = [one.clone() for one in whole.chunk(ranks, 1)]
    total, own = xs.sum(0), xs[rank]

    def check(function, x, result, gradient, back, *dim):
        x = x.clone().requires_grad_()
        y = function(x, group, *dim)
        assert torch.equal(y, result), function.__name__
        y.backward(gradient)
        assert torch.equal(x.grad, back), function.__name__

    check(copy_to_group, whole, whole, own, total)
    check(reduce_from_group, own, total, whole, whole)
    check(scatter_to_group, whole, part[rank], part[rank] * 2, whole * 2, 1)
    check(gather_from_group, part[rank], whole, whole * 2, part[rank] * 2, 1)
    check(gather_from_sequence, part[rank], whole, own, total.chunk(ranks, 1)[rank])
    check(reduce_scatter_to_sequence, own, total.chunk(ranks, 1)[rank], part[rank], whole)

    x = integers(3).requires_grad_()  # through the sum of the gradient's square
    (gradient,) = torch.autograd.grad(copy_to_group(x, group).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert torch.equal(second, torch.full_like(x, 2.0 * ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_way_in_is_the_backward_of_a_way_out(five, ranks):
    five.call(pairs, ranks)


# --- linear layers, exactly ----------------------------------------------------------------------


def linear_layers(ranks, conv, sequence, bias):
    """A column- and a row-parallel layer after one another, on whole numbers: equal to the bit."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return
    torch.manual_seed(0)
    first, second = (
        (Conv1D(24, 10), Conv1D(10, 12))
        if conv
        else (nn.Linear(10, 24, bias), nn.Linear(12, 10, bias))
    )
    for one in (*first.parameters(), *second.parameters()):
        one.data = integers(*one.shape)
    x, target = integers(3, 12, 10), integers(3, 12, 10)

    def between(y):  # some of each of the two parts, as attention does with its three
        one, other = y.chunk(2, -1)
        return one - other

    whole = x.clone().requires_grad_()
    y = second(between(first(whole)))
    y.backward(target)

    column = ColumnParallelLinear(first, group, parts=2, sequence=sequence)
    row = RowParallelLinear(second, group, sequence=sequence)
    model = nn.Sequential(column, row)
    cut = (lambda one: one.chunk(ranks, 1)[rank]) if sequence else (lambda one: one)
    split = cut(x).clone().requires_grad_()
    z = row(between(column(split)))
    z.backward(cut(target))
    sum_sequence_gradients(model)

    assert torch.equal(z, cut(y)) and torch.equal(split.grad, cut(whole.grad))
    weights = dict(nn.Sequential(first, second).named_parameters())
    for name, gradient in whole_gradients(model).items():
        assert torch.equal(gradient, weights[name].grad), name
        assert gradient.stride() == weights[name].stride(), name


def whole_gradients(model):
    """Those of a split model, as `full_state_dict` gathers weights."""
    kept = {one: one.data for one in as_module(model).parameters()}
    try:
        for one in kept:
            one.data = one.grad.contiguous()
        names = dict(as_module(model).named_parameters(remove_duplicate=False))
        return {name: one for name, one in full_state_dict(model).items() if name in names}
    finally:
        for one, own in kept.items():
            one.data = own


def as_module(model):
    return nn.ModuleList(model) if isinstance(model, list) else model


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_linear_layers_are_exact(five, ranks):
    for conv, sequence in product([False, True], repeat=2):
        five.call(linear_layers, ranks, conv, sequence, True)
    five.call(linear_layers, ranks, False, False, False)


# --- whole models --------------------------------------------------------------------------------


def gpt2(tied=True, attention="sdpa", dropout=0.0, blocks=BLOCKS):
    """The same on every rank. Norms and biases are not what they start with, 1 and 0."""
    torch.manual_seed(0)
    config = models.gpt2_config(
        vocabulary=WORDS, positions=LENGTH + 2, hidden=16, heads=4, blocks=blocks
    )
    layers = models.gpt2(config, tied, dropout, attention)
    for one in nn.ModuleList(layers).parameters():
        if one.dim() == 1:
            one.data.normal_(1.0, 0.3)
    return layers


def batch(masked=True, step=0):
    """(inputs, targets, how many of these are valid)"""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (4, LENGTH), generator=generator)
    lengths = torch.tensor([[LENGTH], [5], [3], [6]])
    mask = (torch.arange(LENGTH) < lengths).long()
    targets = tokens.roll(-1, 1)
    if masked:
        targets = targets.masked_fill(mask == 0, models.IGNORE_INDEX)
    count = int((targets != models.IGNORE_INDEX).sum())
    return (tokens, mask) if masked else tokens, targets, count


def gpt2_beside_unsplit(ranks, tied, attention, masked, sequence):
    """The largest differences of loss and gradients in three steps of SGD, and of the weights after
    them; state is compared to the bit."""
    layers = gpt2(tied, attention)
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    unsplit = nn.Sequential(*gpt2(tied, attention))
    parallelize(layers, gpt2_plan(), group, sequence=sequence)
    assert_equal(full_state_dict(layers), nn.ModuleList(unsplit).state_dict())
    if tied:
        assert layers[0].wte.weight is layers[-1].lm_head.weight
    model, apart = nn.Sequential(*layers), [0.0]
    steppers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (unsplit, model)]
    for step in range(3):
        inputs, targets, count = batch(masked, step)
        for stepper in steppers:
            stepper.zero_grad()
        loss = models.loss(unsplit(inputs), targets) / count
        loss.backward()
        split_loss = vocabulary_cross_entropy(model(inputs), targets, group) / count
        split_loss.backward()
        sum_sequence_gradients(model)
        apart.append((split_loss - loss).abs().item())
        gradients = whole_gradients(layers)
        apart += [
            (gradients[name] - one.grad).abs().max().item()
            for name, one in nn.ModuleList(unsplit).named_parameters()
        ]
        for stepper in steppers:
            stepper.step()
    state, expected = full_state_dict(layers), nn.ModuleList(unsplit).state_dict()
    apart += [(state[name] - one).abs().max().item() for name, one in expected.items()]

    load_full_state_dict(layers, expected)
    assert_equal(full_state_dict(layers), expected)
    return max(apart)


def assert_equal(state, expected):
    assert list(state) == list(expected)
    for name, one in expected.items():
        assert torch.equal(state[name], one), name


@pytest.mark.parametrize(
    "tied, attention, masked, sequence",
    [
        (True, "sdpa", True, False),
        (False, "sdpa", False, False),
        (True, "eager", False, False),
        (True, "sdpa", True, True),
        (False, "sdpa", False, True),
        (True, "eager", True, True),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpt2_equals_the_unsplit_model(five, ranks, tied, attention, masked, sequence):
    apart = five.call(gpt2_beside_unsplit, ranks, tied, attention, masked, sequence)
    assert max(apart[:ranks]) <= BOUND


def mlp_beside_unsplit(ranks, wrong=None):
    """How far the gradients of an MLP are from those of the unsplit one, the weights' and x's.

    wrong: "same shard", every rank has that of rank 0; "no all-reduce", the backward has none.
    """
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    torch.manual_seed(0)
    unsplit = nn.Sequential(*models.mlp(2, 8, 24))
    model = parallelize(copy.deepcopy(unsplit), mlp_plan(), group)
    if wrong == "same shard":
        for one in model.parameters():
            dist.broadcast(one.data, 0, group=group)
    xs = [torch.randn(3, 8).requires_grad_()]
    xs.append(xs[0].detach().clone().requires_grad_())
    y = unsplit(xs[0])
    y.square().sum().backward()
    right = tensor_layers.start_reduce
    if wrong == "no all-reduce":
        tensor_layers.start_reduce = lambda x, group: lambda: x
    try:
        z = model(xs[1])
        z.square().sum().backward()
    finally:
        tensor_layers.start_reduce = right
    gradients = whole_gradients(model)
    gradients = [gradients[name] - one.grad for name, one in unsplit.named_parameters()]
    return tuple(
        max(one.abs().max().item() for one in some)
        for some in ([z - y], [xs[1].grad - xs[0].grad], gradients)
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_mlp_equals_the_unsplit_one(five, ranks):
    for apart in five.call(mlp_beside_unsplit, ranks)[:ranks]:
        assert max(apart) <= 4e-6  # of numbers up to 16


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_shard_on_every_rank_is_wrong(five, ranks):
    for output, x, weights in five.call(mlp_beside_unsplit, ranks, "same shard")[:ranks]:
        assert min(output, x, weights) > 0.01


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_backward_without_its_all_reduce_is_wrong(five, ranks):
    for output, x, weights in five.call(mlp_beside_unsplit, ranks, "no all-reduce")[:ranks]:
        assert output <= BOUND and min(x, weights) > 0.01  # nothing is to be seen in the forward


def beside_dtensor():
    """How far output and gradients of an MLP are from those of torch's own tensor parallelism."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    (block,) = models.mlp(1, 8, 24)
    theirs = parallelize_module(
        copy.deepcopy(block), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    ours = parallelize(block, mlp_plan(), group)
    x = torch.randn(3, 8)
    found = []
    for model in (ours, theirs):
        own = x.clone().requires_grad_()
        y = model(own)
        y.square().sum().backward()
        gradients = [getattr(one.grad, "_local_tensor", one.grad) for one in model.parameters()]
        found.append([y, own.grad, *gradients])
    assert [one.shape for one in found[0]] == [one.shape for one in found[1]]
    return max((one - other).abs().max().item() for one, other in zip(*found, strict=True))


def test_torchs_own_gives_the_same_gradients(five):
    assert max(five.call(beside_dtensor)[:2]) <= BOUND


def unsummed_norms(ranks):
    """By parameter, how far gradients are off without `sum_sequence_gradients`."""
    layers = gpt2()
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    unsplit = nn.Sequential(*gpt2())
    inputs, targets, count = batch()
    parallelize(layers, gpt2_plan(), group, sequence=True)
    (models.loss(unsplit(inputs), targets) / count).backward()
    (vocabulary_cross_entropy(nn.Sequential(*layers)(inputs), targets, group) / count).backward()
    gradients = whole_gradients(layers)
    return {
        name: (gradients[name] - one.grad).abs().max().item()
        for name, one in nn.ModuleList(unsplit).named_parameters()
    }


def test_gradients_of_what_is_replicated_along_the_sequence_are_to_be_summed(five):
    for apart in five.call(unsummed_norms, 2)[:2]:
        wrong = {name for name, one in apart.items() if one > 1e-4}
        assert wrong == {
            name for name in apart if "ln_" in name or "wpe" in name or name.endswith("c_proj.bias")
        }


# --- what is sent --------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts the calls that reach torch's backends, by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.count[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


def collectives_of_a_step(blocks, sequence):
    """Calls of the forward, of the loss, and of the backward."""
    layers = gpt2(blocks=blocks)
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    parallelize(layers, gpt2_plan(), group, sequence=sequence)
    inputs, targets, _ = batch()
    counts = []

    def counted(function):
        with Calls() as calls:
            result = function()
        counts.append(calls.count)
        return result

    logits = counted(lambda: nn.Sequential(*layers)(inputs))
    loss = counted(lambda: vocabulary_cross_entropy(logits, targets, group))
    counted(loss.backward)
    return counts


@pytest.mark.parametrize("blocks", [1, 3])
def test_two_all_reduces_each_way_for_a_block(five, blocks):
    forward, loss, backward = five.call(collectives_of_a_step, blocks, False)[0]
    assert forward == {"allreduce_": 2 * blocks + 1}  # and one for the embedding
    assert loss == {"allreduce_": 2}
    assert backward == {"allreduce_": 2 * blocks + 1}  # and one for the head


@pytest.mark.parametrize("blocks", [1, 3])
def test_no_all_reduce_with_sequence_parallelism(five, blocks):
    """But all-gathers, and reduce-scatters, in which each of two ranks sends once."""
    forward, loss, backward = five.call(collectives_of_a_step, blocks, True)[0]
    pairs = 2 * blocks + 1  # one gathers, the other scatters; around the embedding and head too
    assert forward == {"allgather_": pairs, "send": pairs, "recv_": pairs}
    assert loss == {"allreduce_": 2}
    # What the gradient of a column-parallel weight needs is gathered once more.
    assert backward == {"allgather_": 2 * pairs, "send": pairs, "recv_": pairs}


def order_in_a_backward():
    """What a column-parallel layer's backward does, one after the other."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    layer, order = ColumnParallelLinear(nn.Linear(4, 4), group), []
    start, weights = tensor_layers.start_reduce, tensor_layers._weight_gradients

    def told_start(*given):
        order.append("start")
        wait = start(*given)
        return lambda: order.append("wait") or wait()

    def told_weights(*given):
        order.append("weights")
        return weights(*given)

    tensor_layers.start_reduce, tensor_layers._weight_gradients = told_start, told_weights
    try:
        layer(torch.randn(2, 4, requires_grad=True)).sum().backward()
        layer(torch.randn(2, 4)).sum().backward()  # nobody wants this input's gradient
    finally:
        tensor_layers.start_reduce, tensor_layers._weight_gradients = start, weights
    return order


def test_weight_gradients_are_computed_while_the_all_reduce_is_under_way(five):
    assert five.call(order_in_a_backward)[:2] == [["start", "weights", "wait", "weights"]] * 2


def on_shapes_alone(sequence):
    """What comes out of the model, tried with tensors that have a shape only."""
    layers = gpt2(dropout=0.1)
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    parallelize(layers, gpt2_plan(), group, sequence=sequence)
    start, before = shape_inference.StageSignature.of(batch()[0]), torch.get_rng_state()
    with Calls() as calls:
        middle = shape_inference.infer(layers[:2], start)
        end = shape_inference.infer(layers[2:], middle)
    assert not calls.count
    assert torch.equal(torch.get_rng_state(), before)
    value = nn.Sequential(*layers)[:2](batch()[0])
    assert middle == shape_inference.StageSignature.of(value)
    assert end == shape_inference.StageSignature.of(nn.Sequential(*layers)[2:](value))


@pytest.mark.parametrize("sequence", [False, True])
def test_shapes_are_found_without_sending(five, sequence):
    five.call(on_shapes_alone, sequence)


# --- together with the rest ----------------------------------------------------------------------


def pipelines_of_tensor_groups(sequence, schedule):
    """Two stages of two ranks each: how far a step's loss and gradients are from the unsplit."""
    layers, rank = gpt2(), dist.get_rank()
    tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    along = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    if rank >= 4:
        pipeline.join_group_creation()
        return None
    tensor, along = tensor[rank // 2], along[rank % 2]
    unsplit = nn.Sequential(*gpt2())
    inputs, targets, count = batch()
    loss = models.loss(unsplit(inputs), targets) / count
    loss.backward()
    parallelize(layers, gpt2_plan(), tensor, sequence=sequence)
    schedule = getattr(schedules, schedule)(2, 4)
    if any(action.kind == "I" for row in schedule for action in row):
        layers = splittable(layers)

    def split_loss(logits, targets):
        return vocabulary_cross_entropy(logits, targets, tensor)

    with pipeline.Pipeline(layers, schedule, split_loss, group=along) as two:
        found = two.step(inputs, targets, count)
        own = [layers.index(layer) for stage in two.stages.values() for layer in stage.layers]
        model = nn.ModuleDict({str(number): layers[number] for number in own})
        sum_sequence_gradients(model)
        gradients = whole_gradients(model)
        weights = dict(nn.ModuleList(unsplit).named_parameters(remove_duplicate=False))
        apart = [
            (one - weights[name.replace("layer.", "")].grad).abs().max().item()
            for name, one in gradients.items()
        ]
        assert len(apart) > 10
        if rank >= 2:
            apart.append((found - loss).abs().item())
    return max(apart)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_h1"])
@pytest.mark.parametrize("sequence", [False, True])
def test_in_a_pipeline(five, sequence, schedule):
    assert max(five.call(pipelines_of_tensor_groups, sequence, schedule)[:4]) <= BOUND


def recomputed(sequence):
    """Blocks whose activations are computed again, with dropout: gradients equal to the bit."""
    sets = [gpt2(dropout=0.3), gpt2(dropout=0.3)]
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    gradients = []
    for layers, wrap in zip(sets, (Recompute, lambda layer: layer), strict=True):
        parallelize(layers, gpt2_plan(), group, sequence=sequence)
        torch.manual_seed(1)
        model = nn.Sequential(layers[0], *map(wrap, layers[1:-1]), layers[-1])
        inputs, targets, _ = batch()
        vocabulary_cross_entropy(model(inputs), targets, group).backward()
        gradients.append([one.grad for one in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputation_draws_the_same_random_numbers(five, sequence):
    five.call(recomputed, sequence)


def in_bfloat16():
    layers = gpt2()
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    unsplit = nn.Sequential(*gpt2())
    inputs, targets, count = batch()
    parallelize(layers, gpt2_plan(), group)
    with torch.autocast("cpu", torch.bfloat16):
        loss = models.loss(unsplit(inputs), targets) / count
        split = vocabulary_cross_entropy(nn.Sequential(*layers)(inputs), targets, group) / count
    loss.backward()
    split.backward()
    gradients = whole_gradients(layers)
    assert abs(loss - split) < 0.05
    for name, one in nn.ModuleList(unsplit).named_parameters():
        assert gradients[name].dtype == one.grad.dtype == torch.float32
        assert (gradients[name] - one.grad).norm() < 0.1 * (0.1 + one.grad.norm()), name


def test_autocast(five):
    five.call(in_bfloat16)
