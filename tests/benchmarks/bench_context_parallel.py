"""Our context parallelism beside DeepSpeed's Ulysses: forward and backward of causal attention.

Two ranks share a sequence of 8192 tokens, 2 heads of 64 values. The ring and gathered keys and
values have it in head-and-tail order, by which both ranks compute as much; Ulysses in plain order,
as DeepSpeed has it. Each engine is given tensors in the layout that it wants. In single precision
our products of blocks and those of the whole are not the same bits.

The limit is half of one process's own attention (`scaled_dot_product_attention` of half the heads,
on both ranks at once) and after it the bytes that the ring sends, in one go. A ring hides most of
its messages behind computing where a core is left to move them.
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F

from naranhi import context_parallel, costs
from naranhi.context_parallel import join_sequence, split_sequence
from naranhi.measure import baselines
from tests.benchmarks.bench_collectives import shift
from tests.benchmarks.harness import Contenders, Work

RANKS, HEADS, SIZE = 2, 2, 64


def works():
    return [Work("context parallel, 8192 tokens", RANKS, contenders, (8192,), memory=True)]


def contenders(group, length):
    training = Training(group, length)
    make = {
        "naranhi ring": training.ours("ring_attention", "head_tail"),
        "naranhi gathered": training.ours("gathered_attention", "head_tail"),
        "naranhi ulysses": training.ours("ulysses_attention", "plain"),
        "DeepSpeed Ulysses": training.deepspeed,
    }
    return Contenders(make, training.limit(), tolerance=1e-4)


class Training:
    """One attention for all contenders: a run returns its output and its gradients."""

    def __init__(self, group, length):
        generator = torch.Generator().manual_seed(0)
        self.group, self.length = group, length
        self.whole = [torch.randn(1, HEADS, length, SIZE, generator=generator) for _ in range(4)]

    def ours(self, name, order):
        attend = getattr(context_parallel, name)

        def make():
            parts = (split_sequence(x, self.group, order=order, dim=2) for x in self.whole)
            return self._run(
                lambda *own: attend(*own, self.group, order=order),
                *parts,
                whole=lambda x: join_sequence(x, self.group, order=order, dim=2),
            )

        return make

    def deepspeed(self):
        os.environ["LOCAL_RANK"] = str(dist.get_rank(self.group))
        baselines.deepspeed()
        from deepspeed.sequence.layer import DistributedAttention

        def local(*parts):
            heads = (x.transpose(1, 2) for x in parts)
            return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

        attend = DistributedAttention(local, self.group, scatter_idx=2, gather_idx=1)
        parts = (split_sequence(x, self.group, dim=2).transpose(1, 2) for x in self.whole)
        return self._run(
            lambda *own: attend(*own, batch_dim_idx=0),
            *(x.contiguous() for x in parts),
            whole=lambda x: join_sequence(x.transpose(1, 2).contiguous(), self.group, dim=2),
        )

    def _run(self, attend, *own, whole):
        *leaves, to_output = own
        for leaf in leaves:
            leaf.requires_grad_()

        def run():
            for leaf in leaves:
                leaf.grad = None
            output = attend(*leaves)
            output.backward(to_output)
            output = output.detach()
            return lambda: [whole(x) for x in (output, *(leaf.grad for leaf in leaves))]

        return run

    def limit(self):
        *leaves, to_output = (x[:, : HEADS // RANKS].clone() for x in self.whole)
        for leaf in leaves:
            leaf.requires_grad_()
        shape = {"sequence": self.length, "heads": HEADS, "kv_heads": HEADS, "head_size": SIZE}
        sent = costs.context_bytes_sent("ring", RANKS, **shape, element=4)
        move = shift("broadcast", sent, self.group)  # whose root sends all it has to one rank

        def run():
            for leaf in leaves:
                leaf.grad = None
            F.scaled_dot_product_attention(*leaves, is_causal=True).backward(to_output)
            move()

        return run
