"""Sequence parallelism where parameters changed after `parallelize`, beside one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn

from naranhi.data_parallel import DDP
from naranhi.tensor_parallel import (
    Column,
    Row,
    SequenceParallel,
    clip_grad_norm_,
    full_state_dict,
    parallelize,
    scatter_to_group,
    sum_before_other_hooks,
    sum_sequence_gradients,
)
from naranhi.zero import Zero


def assign(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


CHANGES = {
    "unfrozen": lambda model: model.requires_grad_(True),
    "assigned": assign,
    "copied": copy.deepcopy,
}


def models_of(how, group):
    """The unsplit model and the split one, whose norm has other parameters than when it was split,
    each with a hook on the norm."""
    torch.manual_seed(0)
    unsplit = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    split = copy.deepcopy(unsplit)
    split[0].requires_grad_(how != "unfrozen")
    plan = {"0": SequenceParallel(), "1": Column(), "3": Row()}
    split = CHANGES[how](parallelize(split, plan, group, sequence=True))
    for model in (unsplit, split):
        model[0].weight.register_hook(lambda grad: grad.clamp(-1.0, 1.0))
    return unsplit, split


def with_zero(how, stage):
    """How far weights are from one process's after two steps on two ranks."""
    group, rank = first_ranks(2), dist.get_rank()
    singles = [dist.new_group([single]) for single in range(2)]
    if rank >= 2:
        return None
    unsplit, split = models_of(how, group)
    zero = Zero(split, stage, group=singles[rank])
    plain = torch.optim.SGD(unsplit.parameters(), lr=0.1)
    sharded = torch.optim.SGD(zero.param_groups, lr=0.1)
    x = torch.randn(4, 8)
    for _ in range(2):
        plain.zero_grad()
        unsplit(x).square().sum().backward()
        plain.step()
        zero.zero_grad()
        split(scatter_to_group(x, group, -2)).square().sum().backward()
        zero.step(sharded)
    zero.close()
    state = full_state_dict(split)
    return max((state[name] - w).abs().max().item() for name, w in unsplit.state_dict().items())


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sums_the_gradients_all_the_same(five, how, stage):
    assert max(five.call(with_zero, how, stage)[:2]) <= 1e-6


def with_a_hook(how):
    """What is refused in the first step, and how far gradients are in the second."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    unsplit, split = models_of(how, group)
    x, told = torch.randn(4, 8), []
    unsplit(x).square().sum().backward()
    for _ in range(2):
        split.zero_grad()
        split(scatter_to_group(x, group, -2)).square().sum().backward()
        for check in (lambda model: clip_grad_norm_(model, 1e9), sum_sequence_gradients):
            try:
                check(split)
            except RuntimeError as error:
                told.append(str(error))
    apart = [
        (split[0].get_parameter(name).grad - param.grad).abs().max().item()
        for name, param in unsplit[0].named_parameters()
    ]
    return told, max(apart)


@pytest.mark.parametrize("how", CHANGES)
def test_a_hook_that_saw_a_part_is_refused_and_sees_the_whole_next_time(five, how):
    for told, apart in five.call(with_a_hook, how)[:2]:
        *unsummed, refused, again = told
        assert "this rank's part of a sum" in unsummed[0] and "0.weight got a hook" in refused
        assert "this rank's part of a sum: call sum_sequence_gradients" in again  # biases
        assert apart <= 1e-5


def with_ddp(how):
    """What DDP says on two ranks, and how far its gradients are once it is content."""
    group, rank = first_ranks(2), dist.get_rank()
    singles = [dist.new_group([single]) for single in range(2)]
    if rank >= 2:
        return None
    unsplit, split = models_of(how, group)
    try:
        DDP(split, group=singles[rank]).close()
        said = None
    except TypeError as error:
        said = str(error)
    sum_before_other_hooks(split)
    DDP(split, group=singles[rank])
    x = torch.randn(4, 8)
    unsplit(x).square().sum().backward()
    split(scatter_to_group(x, group, -2)).square().sum().backward()
    pairs = [(split[0].weight, unsplit[0].weight), (split[3].bias, unsplit[3].bias)]
    return said, max((own.grad - whole.grad).abs().max().item() for own, whole in pairs)


@pytest.mark.parametrize("how", CHANGES)
def test_ddp_does_not_reduce_what_no_backward_sums(five, how):
    for said, apart in five.call(with_ddp, how)[:2]:
        assert "0.weight was unfrozen, replaced or copied after parallelize" in said
        assert apart <= 1e-5
