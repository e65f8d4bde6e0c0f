"""Tensor parallelism where something is small, empty, or used twice, or takes another way."""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.nn import functional as F

from naranhi import models
from naranhi.autograd import splittable
from naranhi.distributed import Mesh
from naranhi.distributed.mesh import Place
from naranhi.tensor_parallel import (
    Column,
    ColumnParallelLinear,
    Row,
    RowParallelLinear,
    VocabularyParallelHead,
    full_state_dict,
    load_full_state_dict,
    mlp_plan,
    parallelize,
    vocabulary_cross_entropy,
)


def integers(*shape):
    return torch.randint(-4, 5, shape).float()


def whole_numbers(*layers):
    for one in nn.ModuleList(layers).parameters():
        one.data = integers(*one.shape)
    return layers


def member(ranks):
    """The group of the first ranks, and this rank; None for one that is not in it."""
    group = first_ranks(ranks)
    torch.manual_seed(0)
    return (group, dist.get_rank()) if dist.get_rank() < ranks else None


# --- shapes --------------------------------------------------------------------------------------


def inputs_of_any_shape():
    if not (here := member(2)):
        return
    group, rank = here
    first, second = whole_numbers(nn.Linear(10, 6), nn.Linear(6, 10))
    column, row = ColumnParallelLinear(first, group), RowParallelLinear(second, group)
    for x in (
        integers(10),
        integers(3, 10),
        integers(0, 4, 10),
        integers(2, 3, 2, 10),
        integers(10, 4, 3).permute(2, 1, 0),
        integers(3, 1, 10).expand(3, 4, 10),
    ):
        for layer in (first, second, column, row):
            layer.zero_grad()
        xs = [x.clone().requires_grad_() for _ in range(2)]
        y, z = second(first(xs[0])), row(column(xs[1]))
        y.sum().backward()  # whose gradient is one number, expanded
        z.sum().backward()
        assert torch.equal(y, z) and torch.equal(xs[0].grad, xs[1].grad), x.shape
        assert torch.equal(row.bias.grad, second.bias.grad), x.shape
        for mine, whole, dim in (
            (column.weight, first.weight, 0),
            (column.bias, first.bias, 0),
            (row.weight, second.weight, 1),
        ):
            assert torch.equal(mine.grad, whole.grad.chunk(2, dim)[rank]), x.shape


def test_inputs_of_any_shape(five):
    five.call(inputs_of_any_shape)


def complex_numbers(sequence):
    if not (here := member(2)):
        return
    group, rank = here
    first, second = (nn.Linear(4, 4, dtype=torch.complex128) for _ in range(2))
    whole, x = nn.Sequential(first, second), torch.randn(2, 4, 4, dtype=torch.complex128)
    split = nn.Sequential(
        ColumnParallelLinear(first, group, sequence=sequence),
        RowParallelLinear(second, group, sequence=sequence),
    )
    own = x.chunk(2, 1)[rank] if sequence else x
    whole_x, own_x = (each.clone().requires_grad_() for each in (x, own))
    whole(whole_x).abs().sum().backward()
    split(own_x).abs().sum().backward()
    expected = whole_x.grad.chunk(2, 1)[rank] if sequence else whole_x.grad
    torch.testing.assert_close(own_x.grad, expected)
    torch.testing.assert_close(split[0].weight.grad, first.weight.grad.chunk(2, 0)[rank])
    torch.testing.assert_close(split[1].weight.grad, second.weight.grad.chunk(2, 1)[rank])


@pytest.mark.parametrize("sequence", [False, True])
def test_complex_layers(five, sequence):
    five.call(complex_numbers, sequence)


def losses_of_any_targets(ranks):
    """How far losses and gradients are from torch's, by what is special."""
    if not (here := member(ranks)):
        return None
    group, rank = here
    apart = {}
    for what, words, biased, targets in [
        ("nothing valid", 7, False, torch.full((2, 3), models.IGNORE_INDEX)),
        ("no rows", 7, True, torch.empty(0, 3, dtype=torch.long)),
        ("a rank without words", 5, True, torch.randint(5, (2, 3))),
        ("one word", 1, False, torch.zeros(2, 3, dtype=torch.long)),
        ("large logits", 50, False, torch.randint(50, (2, 3))),
    ]:
        head = nn.Linear(4, words, bias=biased)
        if what == "large logits":
            head.weight.data *= 1e4
        split, x = VocabularyParallelHead(head, group), torch.randn(*targets.shape, 4)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        losses = (
            models.loss(head(xs[0]), targets),
            vocabulary_cross_entropy(split(xs[1]), targets, group),
        )
        for loss in losses:
            loss.backward()
        own = [one.grad for one in split.parameters()]
        each = -(-words // ranks)
        whole = [
            F.pad(one.grad, (0, 0) * (one.dim() - 1) + (0, each * ranks - words)).chunk(ranks)[rank]
            for one in head.parameters()
        ]
        pairs = zip([losses[1], xs[1].grad, *own], [losses[0], xs[0].grad, *whole], strict=True)
        apart[what] = max(
            ((one - other).norm() / (1 + other.norm())).item() for one, other in pairs
        )
    return apart


@pytest.mark.parametrize("ranks", [2, 4])
def test_cross_entropy_of_any_targets(five, ranks):
    for apart in five.call(losses_of_any_targets, ranks)[:ranks]:
        assert len(apart) == 5
        for what, far in apart.items():
            assert far <= 1e-6, what  # never nan


# --- precisions ----------------------------------------------------------------------------------


def autocast_of(dtype):
    if not (here := member(2)):
        return None
    linear = nn.Linear(4, 6).to(dtype)
    split = ColumnParallelLinear(linear, here[0])
    x = torch.randn(3, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        return linear(x).dtype, split(x).dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_autocast_leaves_float64_and_complex_numbers_alone(five, dtype):
    assert five.call(autocast_of, dtype)[:2] == [(dtype, dtype)] * 2


# --- layers in two places ------------------------------------------------------------------------


def used_twice(whole_block):
    """A layer, or the block that it is in, stands in the model twice."""
    if not (here := member(2)):
        return
    group, _ = here
    (block,) = models.mlp(1, 8, 12)
    whole_numbers(block)
    if whole_block:
        model, plan = nn.Sequential(block, nn.ReLU(), block), mlp_plan()
    else:
        model = nn.Sequential(block.up, block.down, block.up, block.down)
        plan = {"[02]": Column(), "[13]": Row()}
    state = {name: one.clone() for name, one in model.state_dict().items()}
    y = model(torch.ones(3, 8))
    parallelize(model, plan, group)
    assert len(list(model.parameters())) == 4
    torch.testing.assert_close(model(torch.ones(3, 8)), y)
    for scale in (1, 2):
        found = full_state_dict(model)
        assert list(found) == list(state)
        for name, one in state.items():
            assert torch.equal(found[name], one * scale), name
        load_full_state_dict(model, {name: one * 2 for name, one in state.items()})


@pytest.mark.parametrize("whole_block", [False, True])
def test_a_layer_in_two_places_stays_one(five, whole_block):
    five.call(used_twice, whole_block)


def saved_and_restored():
    """How far outputs are after a step and a return to the state before, and whether state of
    parameters that are tied, but not split, stays one tensor."""
    if not (here := member(2)):
        return None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.LayerNorm(8))
    model[3].weight = model[1].weight
    parallelize(model, {"0": Column(), "2": Row()}, here[0])
    split = model[:1] + model[2:3]  # the norms are not called
    x, best = torch.randn(3, 4), full_state_dict(model)
    before = split(x).detach()
    split(x).square().sum().backward()
    torch.optim.SGD(split.parameters(), lr=1.0).step()
    assert not torch.equal(split(x), before)
    load_full_state_dict(model, best)
    return (split(x) - before).abs().max().item(), best["1.weight"] is best["3.weight"]


def test_a_full_state_is_a_copy(five):
    for apart, tied in five.call(saved_and_restored)[:2]:
        assert apart == 0.0 and tied


class Calibrated(nn.LayerNorm):
    """A layer whose state is more than its tensors."""

    scale = 1.0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def extra_state_restored():
    if not (here := member(2)):
        return None
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), Calibrated(4))
    parallelize(model, {"0": Column(), "1": Row()}, here[0])
    model[2].scale = 3.0
    best = full_state_dict(model)
    model[2].scale = 0.5
    load_full_state_dict(model, best)
    return model[2].scale


def test_extra_state_is_saved_and_restored(five):
    assert five.call(extra_state_restored)[:2] == [3.0, 3.0]


# --- a backward in two parts ---------------------------------------------------------------------


def collectives(function):
    """How often each collective is called in a function."""
    count, right = Counter(), {}
    for name in ("all_reduce", "all_gather"):
        right[name] = getattr(dist, name)

        def counted(*args, name=name, **kwargs):
            count[name] += 1
            return right[name](*args, **kwargs)

        setattr(dist, name, counted)
    try:
        function()
    finally:
        for name, one in right.items():
            setattr(dist, name, one)
    return dict(count)


def in_two_parts(autocast):
    """What is sent for the inputs' gradients and what for the weights', of a column-parallel layer
    and of a head with a bias; gradients are those of a whole backward."""
    if not (here := member(2)):
        return None
    group, _ = here
    sent = []
    for kind, linear in (
        (ColumnParallelLinear, nn.Linear(4, 6)),
        (VocabularyParallelHead, nn.Linear(4, 5)),
    ):
        whole = kind(linear, group)
        (part,) = splittable([kind(linear, group)])
        xs = [torch.randn(3, 4).requires_grad_()]
        xs.append(xs[0].detach().clone().requires_grad_())
        later = []
        part.defer = later.append
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, z = whole(xs[0]), part(xs[1])
        assert torch.equal(y, z)
        y.backward(torch.ones_like(y))
        sent.append(collectives(lambda z=z: z.backward(torch.ones_like(z))))
        assert all(one.grad is None for one in part.parameters())
        sent.append(collectives(lambda later=later: [one() for one in later]))
        torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=0, atol=0.02 if autocast else 1e-6)
        for one, other in zip(part.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    return sent


@pytest.mark.parametrize("autocast", [False, True])
def test_a_backward_in_two_parts_sends_once(five, autocast):
    assert five.call(in_two_parts, autocast)[:2] == [[{"all_reduce": 1}, {}] * 2] * 2


# --- the end of a mesh ---------------------------------------------------------------------------


def closed():
    """In what order a mesh closes its groups, by their axes."""
    if dist.get_rank() >= 4:
        return None
    names, right = [], dist.destroy_process_group
    mesh = Mesh.__new__(Mesh)
    groups, there = (*Place._fields, "replicas", "expert_replicas"), dist.distributed_c10d._pg_map
    for group in groups:
        setattr(mesh, group, group)
        there[group] = None
    dist.destroy_process_group = names.append
    try:
        mesh.close()
    finally:
        dist.destroy_process_group = right
        for group in groups:
            del there[group]
    return names


def test_groups_are_closed_in_one_order(five):
    """On NCCL, ranks that end their communicators in different orders can wait for one another."""
    order = ["data", "pipeline", "tensor", "context", "expert", "replicas", "expert_replicas"]
    assert five.call(closed)[:4] == [order] * 4


def changed_in_place(sequence):
    """How far gradients are from one process's, where a layer changes what a split one returns."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    split = parallelize(copy.deepcopy(whole), {"0": Column(), "2": Row()}, group, sequence=sequence)
    x = torch.randn(3, 6, 4)
    own = x.chunk(2, -2)[rank] if sequence else x
    whole(x).square().sum().backward()
    split(own).square().sum().backward()
    expected = whole[0].weight.grad.chunk(2)[rank]
    return (split[0].weight.grad - expected).abs().max().item()


@pytest.mark.parametrize("sequence", [False, True])
def test_an_activation_may_work_in_place(five, sequence):
    assert max(five.call(changed_in_place, sequence)[:2]) <= 1e-5
