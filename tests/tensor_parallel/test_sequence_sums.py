"""`sum_sequence_gradients` sums once, and gives no gradient to what no rank has used."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn

from naranhi.tensor_parallel import (
    Column,
    Row,
    SequenceParallel,
    clip_grad_norm_,
    parallelize,
    scatter_to_group,
    sum_sequence_gradients,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.other, self.unused = (nn.LayerNorm(8) for _ in range(3))
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)

    def forward(self, x, everywhere=True):
        x = self.other(x) if everywhere else x
        return x + self.down(self.up(self.ln(x)).relu())


def models(group):
    """The model of one process, and the same split over two ranks."""
    plan = {"ln": SequenceParallel(), "other": SequenceParallel(), "unused": SequenceParallel()}
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Block())
    plan |= {"up": Column(), "down": Row()}
    return made[0], parallelize(made[1], plan, group, sequence=True)


def again(what):
    """The error of a second sum, and how far gradients are after a step that follows it."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    plain, split = models(group)
    x, message = torch.randn(2, 4, 8), None

    def backward(model):
        own = x if model is plain else scatter_to_group(x, group, -2)
        model(own).square().sum().backward()

    backward(split)
    sum_sequence_gradients(split)
    if what in ("a backward", "clipped, then a backward"):
        if "clipped" in what:  # in place
            clip_grad_norm_(split, 1e-3)
        backward(split)
        backward(split)
    try:
        sum_sequence_gradients(split)
    except RuntimeError as error:
        message = str(error)
    split.zero_grad(set_to_none=what != "clipped, then a backward")
    backward(split)
    sum_sequence_gradients(split)
    backward(plain)
    return message, apart(split, plain)


def apart(split, plain):
    """The largest difference between gradients that are whole on every rank."""
    names = [f"{layer}.bias" for layer in ("ln", "other", "down")]
    pairs = [[model.get_parameter(name).grad for model in (split, plain)] for name in names]
    return max((one - two).abs().max().item() for one, two in pairs)


@pytest.mark.parametrize("what", ["nothing", "a backward", "clipped, then a backward"])
def test_gradients_are_not_summed_twice(five, what):
    for message, difference in five.call(again, what)[:2]:
        assert message and "was already summed over the tensor group in this step" in message
        assert difference < 1e-5


def zeroed(way):
    """How far gradients of two micro-batches are from one process's, in a second step."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    plain, split = models(group)
    for _ in range(2):
        for model in (plain, split):
            if way == "assigned":  # partial gradients, set by hand
                for param in model.parameters():
                    param.grad = torch.zeros_like(param)
            else:
                model.zero_grad(set_to_none=way == "none")
            for number in range(2):
                x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(number))
                own = x if model is plain else scatter_to_group(x, group, -2)
                model(own).square().sum().backward()
        sum_sequence_gradients(split)
    return apart(split, plain)


@pytest.mark.parametrize("way", ["none", "zeros", "assigned"])
def test_steps_whose_gradients_start_from_none_or_zeros(five, way):
    assert max(five.call(zeroed, way)[:2]) < 1e-4


def by_use():
    """By layer, whether it has a gradient, and whether weight decay has moved it; and the gradient
    of the layer that rank 1 alone has used."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    plain, split = models(group)
    stepper = torch.optim.AdamW(split.parameters(), weight_decay=0.5)
    x = torch.randn(2, 4, 8)
    split(scatter_to_group(x, group, -2), everywhere=rank == 1).sum().backward()
    partial = split.other.weight.grad
    partial = None if partial is None else partial.clone()
    sum_sequence_gradients(split)
    stepper.step()
    return {
        name: (
            split.get_submodule(name).weight.grad is not None,
            not torch.equal(split.get_submodule(name).weight, plain.get_submodule(name).weight),
        )
        for name in ("ln", "other", "unused")
    }, (partial, split.other.weight.grad)


def test_what_no_rank_used_has_no_gradient(five):
    (first, (none, found)), (second, (partial, same)) = five.call(by_use)[:2]
    used, unused = (True, True), (False, False)
    assert first == second == {"ln": used, "other": used, "unused": unused}
    assert none is None and torch.equal(found, partial) and torch.equal(same, partial)
