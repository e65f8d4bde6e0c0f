"""GPT-2 with experts, trained on ranks and in one process; DeepSpeed's layer beside ours."""

import os

import pytest
import torch
import torch.distributed as dist
from expert_gpt2 import backward, gpt2, rows_of
from gloo_ranks import Ranks, first_ranks
from torch import nn

from naranhi import models
from naranhi.expert_parallel import MoE, add_experts, route
from naranhi.measure import baselines
from naranhi.tensor_parallel import (
    gpt2_plan,
    parallelize,
    sum_sequence_gradients,
    vocabulary_cross_entropy,
)

STEPS = 20


def trained(model, rows, everyone=None):
    """The losses of 20 steps with these rows of the batch, summed over `everyone`."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(backward(model, rows, everyone))
        optimizer.step()
    return torch.tensor(losses)


def beside_one_process(ranks, factor, copies):
    """How far losses are from those of one process at most, and the first and the last loss."""
    world, alone, rank = first_ranks(ranks), first_ranks(1), dist.get_rank()
    pairs = [dist.new_group(one) for one in ([0, 1], [2, 3], [0, 2], [1, 3])]
    if rank >= ranks:
        return None
    axes = (pairs[rank // 2], factor, pairs[2 + rank % 2]) if copies else (world, factor)
    losses = trained(gpt2(*axes), rows_of(rank, ranks), world)
    if rank:
        return None
    expected = trained(gpt2(alone, factor), slice(None))
    return (losses - expected).abs().max().item(), losses[0, 0].item(), losses[-1, 0].item()


@pytest.mark.parametrize("ranks, copies", [(1, False), (2, False), (4, False), (4, True)])
@pytest.mark.parametrize("factor", [None, 1.0])
def test_gpt2_with_experts_trains_as_in_one_process(five, ranks, copies, factor):
    apart, first, last = five.call(beside_one_process, ranks, factor, copies)[0]
    assert last < first - 1.0
    assert apart <= 1e-5


def routers_on_a_tensor_group(sequence):
    """How far the router's gradient is from one process's, before it is summed and after."""
    group, rank = first_ranks(2), dist.get_rank()
    singles = [dist.new_group([single]) for single in range(2)]
    if rank >= 2:
        return None

    def gpt2_with_experts(own, **options):
        torch.manual_seed(0)
        layers = models.gpt2(models.gpt2_config(16, 16, 16, 4, 2), True, 0.0)
        return add_experts(layers, 4, 1, own, coefficient=0.01, **options)

    plain = gpt2_with_experts(singles[rank])
    split = gpt2_with_experts(singles[rank], replicas=group, tensor=group, sequence=sequence)
    parallelize(split, gpt2_plan(), group, sequence=sequence)
    tokens = torch.arange(32).view(2, 16) % 13
    models.loss(nn.Sequential(*plain)(tokens), tokens).backward()
    vocabulary_cross_entropy(nn.Sequential(*split)(tokens), tokens, group).backward()
    expected, found = (layers[2].block.mlp.moe.router.weight for layers in (plain, split))
    before = (found.grad - expected.grad).abs().max().item()
    sum_sequence_gradients(split)
    return before, (found.grad - expected.grad).abs().max().item()


@pytest.mark.parametrize("sequence", [False, True])
def test_routers_on_a_tensor_group_need_their_sum(five, sequence):
    for before, after in five.call(routers_on_a_tensor_group, sequence)[:2]:
        assert before > 1e-2 and after <= 1e-5


# --- DeepSpeed's layer ---------------------------------------------------------------------------

HIDDEN, FFN = 16, 24


@pytest.fixture(scope="module")
def two():
    """DeepSpeed makes its groups of the whole world."""
    with Ranks(2, deadline=120.0) as ranks:
        yield ranks


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def beside_deepspeed(cases):
    """By case, the largest difference of output, gradients and auxiliary loss; and the dropped."""
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank)
    baselines.deepspeed()
    from deepspeed.moe.layer import MoE as DeepSpeedMoE

    singles, found = [dist.new_group([one]) for one in range(2)], {}
    for ranks, top_k, factor in cases:
        torch.manual_seed(0)
        ours = MoE(HIDDEN, FFN, 8, top_k, singles[rank] if ranks == 1 else None, factor)
        theirs = DeepSpeedMoE(
            HIDDEN,
            Expert(),
            8,
            ep_size=ranks,
            k=top_k,
            capacity_factor=factor or 1.0,
            min_capacity=0,
            drop_tokens=factor is not None,
            use_rts=False,  # random choice of whom to drop
            top2_2nd_expert_sampling=False,  # random choice of the second expert
        )
        theirs.set_deepspeed_parallelism()
        experts = theirs.deepspeed_moe.experts.deepspeed_experts
        theirs.deepspeed_moe.gate.wg.weight.data = ours.router.weight.detach().clone()
        for expert, up, down in zip(experts, ours.up, ours.down, strict=True):
            expert.up.weight.data = up.detach().t().contiguous()
            expert.down.weight.data = down.detach().t().contiguous()
        tokens, target = torch.randn(2, 2, 30, HIDDEN)[:, rank]
        results = []
        for layer in (ours, theirs):
            own = tokens.clone().requires_grad_()
            output, auxiliary, *_ = layer(own)
            (output * target).sum().backward()
            results.append([output.detach(), own.grad, auxiliary.detach()])
        results[0] += [ours.router.weight.grad, ours.up.grad, ours.down.grad]
        results[1] += [
            theirs.deepspeed_moe.gate.wg.weight.grad,
            torch.stack([expert.up.weight.grad.t() for expert in experts]),
            torch.stack([expert.down.weight.grad.t() for expert in experts]),
        ]
        if factor is not None:  # it divides a token's gates by the sum of those that were kept
            results = [results[0][:1], results[1][:1]]
            results[0][0] = results[0][0] / kept_gates(ours, tokens)[:, None]
            found[ranks, top_k, factor] = apart(*results)[0], ours.plan.dropped
            continue
        differences = apart(*results)
        auxiliary = differences.pop(2)
        found[ranks, top_k, factor] = max(differences), auxiliary
    return found


def apart(ours, theirs):
    return [(one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True)]


def kept_gates(moe, tokens):
    """The sum of each token's gates whose experts had room; 1 if none had."""
    gates = route(moe.router(tokens), moe.top_k).gates.t().flatten()
    kept = torch.zeros(len(tokens))
    kept.index_add_(0, moe.plan.order % len(tokens), gates[moe.plan.order])
    return kept.where(kept > 0, 1.0).detach()


def test_deepspeeds_layer_computes_the_same(two):
    """Without dropping, on one rank and on two. Its auxiliary loss is of each rank, and for two
    experts counts first choices only."""
    cases = [(ranks, top_k, None) for ranks in (1, 2) for top_k in (1, 2, 3)]
    for found in two.call(beside_deepspeed, cases):
        for (ranks, top_k, _), (difference, auxiliary) in found.items():
            assert difference <= 1e-5, (ranks, top_k)
            assert (auxiliary <= 1e-6) == (ranks == 1 and top_k != 2), (ranks, top_k)


def test_deepspeed_drops_the_same_on_one_rank(two):
    """For two experts. (For one it drops in no order; for more, by probability.) On two ranks each
    rank fills a capacity of its own, so that other choices are dropped."""
    for found in two.call(beside_deepspeed, [(1, 2, 0.7), (2, 2, 0.7)]):
        difference, dropped = found[1, 2, 0.7]
        assert difference <= 1e-5 and dropped > 0
        assert found[2, 2, 0.7][0] > 0.01


def widths(n_inner):
    """Of an MLP of GPT-2, and of an expert in its place."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    config = models.gpt2_config(16, 16, 16, 4, 2)
    config.n_inner = n_inner
    layers = models.gpt2(config, True, 0.0)
    width = layers[2].block.mlp.c_fc.weight.shape[1]
    return width, add_experts(layers, 2, 1, group)[2].block.mlp.moe.up.shape[-1]


@pytest.mark.parametrize(("n_inner", "width"), [(None, 64), (24, 24)])
def test_an_expert_is_as_wide_as_the_mlp_was(five, n_inner, width):
    assert five.call(widths, n_inner)[:2] == [(width, width)] * 2
