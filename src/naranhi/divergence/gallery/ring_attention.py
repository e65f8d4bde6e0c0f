"""Stale blocks: ring attention whose backward uses the wrong rank's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from naranhi.distributed import device_of
from naranhi.divergence.gallery import toys
from naranhi.divergence.gallery.bug import Bug, Case, Expected

Blocks = Callable[[torch.Tensor, torch.Tensor], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def around_the_ring(
    k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's keys and values, then those of the previous rank, and so on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    block = torch.stack([k, v])
    for step in range(ranks):
        yield block[0], block[1]
        if step < ranks - 1:
            arriving = torch.empty_like(block)
            send = dist.P2POp(dist.isend, block, (rank + 1) % ranks)
            receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            block = arriving


def saved_blocks(k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Send keys and values round the ring, and compute with those that the forward saved."""
    for _ in around_the_ring(k, v):
        yield k, v


class RingAttention(Function):
    """Attention over sequences of which each rank has a part: (rows, length / ranks, hidden).

    The forward saves this rank's keys and values, and the attention weights of its queries. The
    backward takes the keys and values from `blocks`, which sends them around the ring again.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks
    ) -> torch.Tensor:
        """Return the attention output of this rank's queries."""
        keys, values = zip(*around_the_ring(k, v), strict=True)
        weights = (q @ torch.cat(keys, 1).mT / q.shape[-1] ** 0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.blocks = blocks
        return weights @ torch.cat(values, 1)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of this rank's queries, keys and values."""
        q, k, v, weights = ctx.saved_tensors
        keys, values = zip(*ctx.blocks(k, v), strict=True)
        to_weights = gradient @ torch.cat(values, 1).mT
        inner = (to_weights * weights).sum(-1, keepdim=True)
        to_scores = weights * (to_weights - inner) / q.shape[-1] ** 0.5
        to_q = to_scores @ torch.cat(keys, 1)
        to_k, to_v = to_scores.mT @ q, weights.mT @ gradient
        return to_q, _to_owner(to_k), _to_owner(to_v), None


def _to_owner(gradient):
    """Return the sum of all ranks' gradients of this rank's block; block i is rank - i's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    blocks = gradient.chunk(ranks, 1)
    by_rank = torch.stack([blocks[(rank - owner) % ranks] for owner in range(ranks)])
    dist.all_reduce(by_rank)
    return by_rank[rank]


class AttentionBlock(nn.Module):
    """x + attend(q(x), k(x), v(x)).

    Args:
        attend: a function of queries, keys and values.
    """

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    attend: Callable[..., torch.Tensor]

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(toys.HIDDEN, toys.HIDDEN) for _ in range(3))
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + attend(q(x), k(x), v(x))."""
        return x + self.attend(self.q(x), self.k(x), self.v(x))


def ring_case(blocks: Blocks) -> Case:
    """Return the case of two blocks of attention, of whose sequences each rank has a part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device_of().type, (ranks,), mesh_dim_names=("context",))

    def layers(attend) -> list[nn.Module]:
        torch.manual_seed(0)
        return toys.on_device([AttentionBlock(attend) for _ in range(2)])

    def sequences(step):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(toys.ROWS, toys.LENGTH, toys.HIDDEN, generator=generator)
        inputs = inputs.to(device_of())
        return inputs, inputs.mean(1, keepdim=True) - inputs.roll(1, -1)

    def alone(layers, step):
        inputs, targets = sequences(step)
        loss = toys.squared_error(toys.forward(layers, inputs), targets) / targets.numel()
        loss.backward()
        return loss.item()

    def run(layers, step):
        inputs, targets = sequences(step)
        part, wanted = (x.chunk(ranks, 1)[rank] for x in (inputs, targets))
        loss = toys.squared_error(toys.forward(layers, part), wanted) / targets.numel()
        loss.backward()
        for param in nn.ModuleList(layers).parameters():
            dist.all_reduce(param.grad)
        return toys.total(loss)

    def attend(q, k, v):
        return RingAttention.apply(q, k, v, blocks)

    whole = layers(F.scaled_dot_product_attention)
    return Case(whole, alone, layers(attend), run, mesh, toys.sgd, toys.sgd)


STALE_BLOCKS = Bug(
    name="stale blocks",
    symptom="the first loss is one process's to the last digit; from the second on the curves part",
    hint="the forward is right: which keys and values does each step of the backward read?",
    wrong=saved_blocks,
    right=around_the_ring,
    make=ring_case,
    expected=Expected("backward", "1.k", "context"),
    reports=(
        "https://github.com/huggingface/diffusers/issues/14265",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/3157",
    ),
)
