"""Our mixture of experts beside DeepSpeed's: forward and backward of one layer on two ranks.

Each rank has some tokens and half of the experts, which are gelu between two products without
biases. Both layers have the same weights, and so the same routing. DeepSpeed drops no token either
(`drop_tokens=False`), and chooses the second expert by its probability, without noise. Its router
also computes an auxiliary loss; as its second choices do not count in it, neither loss is used.

Two routings: about even, as random weights give it, and skewed, where one expert has the most of
the tokens. DeepSpeed then pads every expert to the rows of that one, because its blocks are of
equal size.

The limit is the larger of the products of the experts, forward and backward, on the rows of the
rank that has most of them, on all ranks at once, and of moving the rows of an even routing four
times: in the forward to the experts and back, in the backward the same.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from naranhi.expert_parallel import MoE
from naranhi.measure import baselines
from tests.benchmarks.bench_collectives import shift
from tests.benchmarks.bench_data_parallel import larger
from tests.benchmarks.harness import Contenders, Work

RANKS, EXPERTS, TOP_K = 2, 8, 2


def works():
    return [
        Work("experts, hidden 256, even", RANKS, contenders, (256, 1024, 0.0), memory=True),
        Work("experts, hidden 256, skewed", RANKS, contenders, (256, 1024, 1.0), memory=True),
        Work("experts, hidden 32, even", RANKS, contenders, (32, 128, 0.0)),
    ]


def contenders(group, hidden, tokens, skew):
    """tokens: of each rank; skew: what the router adds for one expert."""
    layers = Layers(group, hidden, tokens, skew)
    move = shift("all_to_all", TOP_K * tokens * hidden * 4, group)
    limit = larger(layers.products(), lambda: [move() for _ in range(4)], group)
    make = {"naranhi": layers.naranhi, "DeepSpeed": layers.deepspeed}
    return Contenders(make, limit, tolerance=1e-5)


class Layers:
    """One mixture of experts for both, and tokens for each rank. A run gives the output and all
    gradients that this rank has."""

    def __init__(self, group, hidden, tokens, skew):
        torch.manual_seed(0)
        self.group, self.rank, self.hidden = group, dist.get_rank(group), hidden
        self.moe = MoE(hidden, 4 * hidden, EXPERTS, TOP_K, group)
        self.tokens, self.target = torch.randn(2, RANKS, tokens, hidden)[:, self.rank]
        self.tokens[:, 0] = 1.0
        with torch.no_grad():
            self.moe.router.weight[:, 0] = 0.0
            self.moe.router.weight[0, 0] = skew

    def step(self, layer, tokens):
        layer.zero_grad()
        tokens.grad = None
        output, *_ = layer(tokens)
        (output * self.target).mean().backward()
        return output.detach()

    def naranhi(self):
        tokens = self.tokens.clone().requires_grad_()

        def run():
            output = self.step(self.moe, tokens)
            own = self.moe.router.weight, self.moe.up, self.moe.down
            return [output, tokens.grad, *(one.grad for one in own)]

        return run

    def deepspeed(self):
        os.environ["LOCAL_RANK"] = str(self.rank)
        deepspeed = baselines.deepspeed()
        deepspeed.utils.logger.setLevel("ERROR")
        from deepspeed.moe.layer import MoE as DeepSpeedMoE

        layer = DeepSpeedMoE(
            self.hidden,
            Expert(self.hidden),
            EXPERTS,
            ep_size=RANKS,
            k=TOP_K,
            min_capacity=0,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )
        layer.set_deepspeed_parallelism()
        layer.deepspeed_moe.ep_group = self.group  # as ours: not checked in each call
        experts = layer.deepspeed_moe.experts.deepspeed_experts
        gate = layer.deepspeed_moe.gate.wg.weight
        gate.data = self.moe.router.weight.detach().clone()
        for expert, up, down in zip(experts, self.moe.up, self.moe.down, strict=True):
            expert.up.weight.data = up.detach().t().contiguous()
            expert.down.weight.data = down.detach().t().contiguous()
        tokens = self.tokens.clone().requires_grad_()

        def run():
            output = self.step(layer, tokens)
            return lambda: [output, tokens.grad, gate.grad, *stacked(experts)]

        return run

    def products(self):
        """The products of the fullest rank's experts, forward and backward, on every rank."""
        self.moe(self.tokens)
        rows = self.moe.load.view(RANKS, -1).sum(1).max().item()
        sizes = [rows * RANKS // EXPERTS] * (EXPERTS // RANKS)
        wide = [torch.randn(size, 4 * self.hidden) for size in sizes]
        narrow = [torch.randn(size, self.hidden) for size in sizes]
        up, down = self.moe.up.detach(), self.moe.down.detach()

        def run():
            for own, inner, first, second in zip(narrow, wide, up, down, strict=True):
                for _ in range(2):  # the product, and its rows' gradient
                    torch.mm(own, first)
                    torch.mm(inner, second)
                torch.mm(own.t(), inner)
                torch.mm(inner.t(), own)

        return run


class Expert(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def stacked(experts):
    """The gradients of DeepSpeed's experts as ours has them."""
    for name in ("up", "down"):
        yield torch.stack([getattr(expert, name).weight.grad.t() for expert in experts])
