"""Our tensor parallelism beside `parallelize_module`: forward and backward of 8 blocks, two ranks.

Blocks are of an MLP (64 rows) or of attention alone (4 sequences of 64 tokens, 4 heads), with a
residual. What goes in needs a gradient, as what comes from an embedding does.

GPT-2's attention computes queries, keys and values in one product. The peer's does so too: DTensor
cuts a weight into consecutive rows, so its weight has those of a head beside each other, as
Megatron's has.

The limit is the time in which a rank computes with its own parts and without the others, on all
ranks at once, and then sends, in one go, the bytes that the forward's all-reduces must: nothing can
hide these. Those of the backward can be hidden, behind the gradients of weights.
"""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from naranhi import models
from naranhi.tensor_parallel import Column, Heads, Row, mlp_plan, parallelize
from tests.benchmarks.bench_collectives import shift
from tests.benchmarks.harness import Contenders, Work

RANKS, BLOCKS, ROWS, HEADS, TOKENS = 2, 8, 64, 4, (4, 64)


def works():
    return [
        Work(f"tensor parallel {kind.__name__}, width {width}", RANKS, kind, (width,))
        for kind in (mlp, attention)
        for width in (512, 32)
    ]


def mlp(group, width):
    torch.manual_seed(0)
    blocks = nn.Sequential(*models.mlp(BLOCKS, width))
    ours = parallelize(copy.deepcopy(blocks), mlp_plan(), group)
    theirs = cut_by_torch(blocks, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    own = nn.Sequential(*models.mlp(BLOCKS, width, 4 * width // RANKS))
    return contenders(group, torch.randn(ROWS, width), ours, theirs, own)


def attention(group, width):
    torch.manual_seed(0)
    config = models.gpt2_config(hidden=width, heads=HEADS, blocks=BLOCKS)
    layers = [layer.block.attn for layer in models.gpt2(config, dropout=0.0)[1:-1]]
    theirs = nn.Sequential(*(Attention(width, HEADS, layer) for layer in layers))
    theirs = cut_by_torch(theirs, {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
    plan = {"*.attn": Heads(), "*.c_attn": Column(parts=3), "*.c_proj": Row()}
    ours = parallelize(nn.Sequential(*(GPT2Attention(layer) for layer in layers)), plan, group)
    own = nn.Sequential(*(Attention(width, HEADS // RANKS) for _ in layers))
    return contenders(group, torch.randn(*TOKENS, width), ours, theirs, own)


def cut_by_torch(blocks, plan):
    # Not of a group that ends with the work: to DTensor, meshes of the same ranks are one.
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for block in blocks:
        parallelize_module(block, mesh, plan)
    return blocks


def contenders(group, inputs, ours, theirs, own):
    """own: what computes as much as a rank's parts do."""
    compute, move = step(own, inputs), shift("all_reduce", BLOCKS * inputs.nbytes, group)

    def limit():
        compute()
        move()

    make = {
        "naranhi": partial(step, ours, inputs),
        "torch parallelize_module": partial(step, theirs, inputs),
    }
    return Contenders(make, limit, tolerance=1e-6)


def step(blocks, inputs):
    """A run that returns a function that gives all gradients of this rank."""
    inputs = inputs.clone().requires_grad_()

    def run():
        inputs.grad = None
        blocks.zero_grad()
        blocks(inputs).square().mean().backward()
        return gradients

    def gradients():
        return [inputs.grad, *(local(name, one.grad) for name, one in blocks.named_parameters())]

    return run


def local(name, gradient):
    """This rank's part of a gradient, with outputs and inputs in the order of torch's blocks."""
    if isinstance(gradient, DTensor):
        split = gradient.placements[0].is_shard()
        return gradient.to_local() if split else gradient.full_tensor()
    if "c_attn" in name or "c_proj" in name:
        gradient = gradient.t()  # of a weight: inputs came first
    if "c_attn" in name:
        gradient = gradient.unflatten(0, (3, HEADS // RANKS, -1)).transpose(0, 1).flatten(0, 2)
    return gradient


class GPT2Attention(nn.Module):
    """x + attention(x): (batch, sequence, hidden) in and out."""

    def __init__(self, attention):
        super().__init__()
        self.attn = attention

    def forward(self, x):
        return x + self.attn(x)[0]


class Attention(nn.Module):
    """The same of `heads` heads, the size of which is that of HEADS ones of the whole model.

    attention: GPT-2's, from which the weights are taken.
    """

    def __init__(self, hidden, heads, attention=None):
        super().__init__()
        self.size = hidden // HEADS
        self.qkv = nn.Linear(hidden, 3 * heads * self.size)
        self.out = nn.Linear(heads * self.size, hidden)
        if attention:
            for mine, other in ((self.qkv, attention.c_attn), (self.out, attention.c_proj)):
                mine.weight.data, mine.bias.data = other.weight.t().clone(), other.bias.clone()
            for one in self.qkv.parameters():
                one.data = one.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2).data

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.size)).transpose(1, 2)
        q, k, v = heads.unbind(3)
        values = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(values.transpose(1, 2).flatten(2))
