"""Weights between split layers: norms of queries and keys, as Qwen3 and OLMo-2 have them."""

import copy

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.nn import functional as F

from naranhi import schedules
from naranhi.data_parallel import DDP
from naranhi.pipeline import Pipeline, join_group_creation
from naranhi.tensor_parallel import (
    Column,
    PartialGradient,
    Row,
    clip_grad_norm_,
    full_state_dict,
    parallelize,
    sum_sequence_gradients,
)
from naranhi.zero import Zero, ZeroStages

WIDTH, HEAD = 16, 4
PLAN = {"[qkv]": Column(), "o": Row()}
NORMS = {"*_norm": PartialGradient()}


class Attention(nn.Module):
    """Heads of a given size, however many there are, with norms of queries and keys."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in self.parts())
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def parts(self):
        return self.q, self.k, self.v


def trained(ranks, norms, sequence, wrapper):
    """On a rank: how far three steps are from those of one process, by parameter."""
    group = first_ranks(ranks)
    alone = [dist.new_group([rank]) for rank in range(ranks)]
    if (rank := dist.get_rank()) >= ranks:
        return None
    torch.manual_seed(0)
    one = Attention()
    plan = PLAN | (NORMS if norms else {})
    ours = parallelize(copy.deepcopy(one), plan, group, sequence=sequence)
    wrapped = {"DDP": DDP, "Zero": lambda m, group: Zero(m, 2, group=group)}.get(wrapper)
    wrapped = wrapped and wrapped(ours, alone[rank])
    zero = wrapped if wrapper == "Zero" else None
    mine = torch.optim.SGD(zero.param_groups if zero else ours.parameters(), lr=0.5)
    theirs = torch.optim.SGD(one.parameters(), lr=0.5)
    for step in range(3):
        x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step))
        theirs.zero_grad()
        one(x).square().mean().backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.05)
        theirs.step()
        part = x.chunk(ranks, 1)[rank] if sequence else x
        (ours(part).square().sum() / x.numel()).backward()
        if zero:
            zero.clip_grad_norm_(0.05)
            zero.step(mine)
        else:
            sum_sequence_gradients(ours)
            clip_grad_norm_(ours, 0.05)
            mine.step()
            mine.zero_grad()
    if zero:
        zero.close()
    state = full_state_dict(ours)
    return {name: (state[name] - p).abs().max().item() for name, p in one.named_parameters()}


@pytest.mark.parametrize("wrapper", [None, "DDP", "Zero"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_norms_of_queries_and_keys_train_as_in_one_process(five, ranks, sequence, wrapper):
    for apart in five.call(trained, ranks, True, sequence, wrapper)[:ranks]:
        assert max(apart.values()) < 1e-6, apart


def test_unnamed_norms_get_a_part_of_their_gradient(five):
    """So the entry is what makes it right."""
    apart = five.call(trained, 2, False, False, None)[0]
    assert min(apart["q_norm.weight"], apart["k_norm.weight"]) > 1e-5


def unsummed():
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    model = parallelize(Attention(), PLAN | NORMS, group)
    model(torch.ones(1, 4, WIDTH)).sum().backward()
    with pytest.raises(RuntimeError) as error:
        clip_grad_norm_(model, 1.0)
    with pytest.raises(ValueError) as composed:
        parallelize(nn.Sequential(nn.Sequential(nn.RMSNorm(4))), {"0": PartialGradient()}, group)
    return str(error.value), str(composed.value)


def test_a_forgotten_sum_and_a_composed_layer_are_refused(five):
    for forgotten, composed in five.call(unsummed)[:2]:
        assert "sum_sequence_gradients" in forgotten and "q_norm.weight" in forgotten
        assert "has to name the layers inside it, one by one" in composed


def in_stages(way):
    """On a rank: how far the stages of a pipeline, in shards, are from one process."""
    pairs = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[rank] for rank in range(4)]
    made = [[dist.new_group(ranks) for ranks in axis] for axis in pairs]
    if (rank := dist.get_rank()) >= 4:
        return join_group_creation()
    tensor, replicas, alone = made[0][rank // 2], made[1][rank % 2], made[2][rank]
    torch.manual_seed(0)
    one = nn.Sequential(Attention(), Attention())
    plan = {f"[01].{name}": kind for name, kind in (PLAN | NORMS).items()}
    ours = parallelize(copy.deepcopy(one), plan, tensor)
    schedule = schedules.with_sharding(schedules.gpipe(1, 2), **way)
    axes = {"group": alone, "replicas": replicas, "sharding": ZeroStages}
    theirs = torch.optim.SGD(one.parameters(), lr=0.5)
    with Pipeline(ours, schedule, lambda y, target: y.square().sum(), **axes) as pipeline:
        mine = torch.optim.SGD(pipeline.sharded.param_groups, lr=0.5)
        for step in range(3):
            x = torch.randn(8, 4, WIDTH, generator=torch.Generator().manual_seed(step))
            theirs.zero_grad()
            one(x).square().mean().backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.05)
            theirs.step()
            share = x.chunk(2)[rank // 2]
            pipeline.step(share, share, x.numel())
            pipeline.clip_grad_norm_(0.05)
            pipeline.sharded.step(mine)
        with pipeline.sharded.gathered():
            state = full_state_dict(ours)
    return {name: (state[name] - p).abs().max().item() for name, p in one.named_parameters()}


@pytest.mark.parametrize(
    "way", [{"stage": 2}, {"stage": 2, "reduce_each": True}, {"stage": 3, "keep": 0}], ids=str
)
def test_stages_in_shards_train_as_one_process(five, way):
    """Their parameters have no hooks, so no backward sums."""
    for apart in five.call(in_stages, way)[:4]:
        assert max(apart.values()) < 1e-6, apart
