"""Random numbers: others on each rank inside the split region, the same outside."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel

from naranhi import models
from naranhi.tensor_parallel import fork_rng, gpt2_plan, parallelize
from naranhi.tensor_parallel.random import ShardedDropout


def everyone(x, group):
    """Of each rank, its x."""
    x = x.detach().contiguous()
    table = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(table, x, group=group)
    return table


def same(x, group):
    return all(torch.equal(x, other) for other in everyone(x, group))


def all_differ(x, group):
    table = everyone(x, group)
    return not any(torch.equal(one, other) for i, one in enumerate(table) for other in table[:i])


def modes(sequence):
    """By name, which modules of a model are in training: before `parallelize` and after it."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    layers = models.gpt2(models.gpt2_config(16, 12, 16, 4, 1), True, 0.5)
    model = nn.ModuleList(layers)
    model[1].block.attn.resid_dropout.eval()
    model[1].block.mlp.eval()
    model[0].drop.eval()
    before = {name: module.training for name, module in model.named_modules()}
    parallelize(layers, gpt2_plan(), group, sequence=sequence)
    after = nn.ModuleList(layers).named_modules()
    return before, {name: module.training for name, module in after}


@pytest.mark.parametrize("sequence", [False, True])
def test_frozen_dropouts_stay_frozen(five, sequence):
    for before, after in five.call(modes, sequence)[:2]:
        assert after == before and not all(before.values())


def averaged(sequence):
    """How far the average of a split model, a deep copy at first, is from the model's outputs, and
    whether tied weights of the copy are one."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    layers = models.gpt2(models.gpt2_config(16, 12, 16, 4, 1), True, 0.5)
    parallelize(layers, gpt2_plan(), group, sequence=sequence)
    model, tokens = nn.Sequential(*layers), torch.arange(12).view(1, 12)
    average, outputs = AveragedModel(model), []
    average.update_parameters(model)
    assert average.module[0].wte.weight is not layers[0].wte.weight
    for other in (model, average):
        torch.manual_seed(1)
        outputs.append(other(tokens))
    tied = average.module[0].wte.weight is average.module[-1].lm_head.weight
    return (outputs[0] - outputs[1]).abs().max().item(), tied


@pytest.mark.parametrize("sequence", [False, True])
def test_a_split_model_is_averaged(five, sequence):
    for apart, tied in five.call(averaged, sequence)[:2]:
        assert apart == 0.0 and tied


def numbers(ranks):
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return
    torch.manual_seed(0)
    inside = []
    for _ in range(3):
        assert same(torch.rand(8), group)
        with fork_rng(torch.empty(1), group):
            inside.append(torch.rand(8))
            torch.rand(rank)  # some draw more than others
    assert same(torch.rand(8), group)
    for one in inside:
        assert all_differ(one, group)
    assert not torch.equal(inside[0], inside[1])

    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), fork_rng(torch.empty(1), group):
        torch.rand(rank)
        raise ZeroDivisionError
    assert same(torch.rand(8), group)
    torch.set_rng_state(state)
    with fork_rng(torch.empty(1), group):
        again = torch.rand(8)
    torch.set_rng_state(state)
    with fork_rng(torch.empty(1), group):
        assert torch.equal(again, torch.rand(8))  # torch's state is all there is

    drop, x = ShardedDropout(0.5, group), torch.ones(1000)
    y = drop(x)
    assert all_differ(y, group) and 0.4 < (y == 0).float().mean() < 0.6
    assert drop.eval()(x) is x


@pytest.mark.parametrize("ranks", [2, 4])
def test_others_inside_and_the_same_outside(five, ranks):
    five.call(numbers, ranks)


def in_gpt2(attention, sequence):
    """Every head has the same weights, so that without dropout all heads put out the same."""
    torch.manual_seed(0)
    config = models.gpt2_config(vocabulary=16, positions=8, hidden=16, heads=4, blocks=1)
    layers = models.gpt2(config, dropout=0.4, attention=attention)
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    weight = layers[1].block.attn.c_attn.weight.data
    weight.copy_(weight.view(16, 3, 4, 4)[:, :, :1].expand(-1, -1, 4, -1).reshape(16, 48))
    parallelize(layers, gpt2_plan(), group, sequence=sequence)
    seen = {}
    attn = layers[1].block.attn
    attn.c_proj.register_forward_pre_hook(lambda _, x: seen.update(values=x[0]))
    model, tokens = nn.Sequential(*layers[:2]), torch.randint(16, (2, 8))
    inputs = tokens, torch.ones_like(tokens)

    def drops(model):  # how dropout of zeros and ones falls at each place outside the products
        return [
            one(torch.ones(2, 8, 16))
            for one in (
                model[0].drop,
                model[1].block.attn.resid_dropout,
                model[1].block.mlp.dropout,
            )
        ]

    torch.manual_seed(1)
    hidden, _ = model(inputs)
    assert all_differ(seen["values"], group)
    assert all_differ(hidden, group) if sequence else same(hidden, group)
    for one in drops(model):
        assert all_differ(one, group) if sequence else same(one, group)
    assert same(torch.rand(8), group)  # what comes after is drawn alike
    model.eval()
    model(inputs)
    assert same(seen["values"], group)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_of_gpt2(five, attention, sequence):
    five.call(in_gpt2, attention, sequence)
