"""A mixture of experts on real ranks, against one process that has all tokens and all experts."""

import math

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_experts import mixture

from naranhi.expert_parallel import MoE, sum_gradients

HIDDEN, FFN, EXPERTS = 6, 10, 12  # 1 to 4 ranks divide the experts
COEFFICIENT = 0.3  # of the auxiliary loss: large, so that nobody can miss it
SIZES = [5, 9, 0, 4]  # tokens of each rank: uneven, and none on one


def layer(group=None, top_k=2, capacity_factor=None, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return MoE(HIDDEN, FFN, EXPERTS, top_k, group, capacity_factor, **options).to(dtype)


def shares(sizes, dtype=torch.float64):
    """(tokens, weights of the loss) of each rank; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, size, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
        for size in sizes
    ]


def whole_weights(moe, group):
    """(router, up, down) of the whole layer, in one process."""
    parts = [[None] * moe.ranks for _ in range(2)]
    for gathered, own in zip(parts, (moe.up, moe.down), strict=True):
        dist.all_gather_object(gathered, own.detach(), group=group)
    weights = [moe.router.weight.detach(), *map(torch.cat, parts)]
    return [weight.clone().requires_grad_() for weight in weights]


def one_process(moe, group, parts, coefficient=COEFFICIENT):
    """(outputs, auxiliary loss, gradients of tokens, router, up and down, dropped)."""
    weights = whole_weights(moe, group)
    tokens = torch.cat([own for own, _ in parts]).requires_grad_()
    factor, capacity = moe.capacity_factor, None
    if factor is not None:
        capacity = math.ceil(factor * moe.top_k * len(tokens) / EXPERTS)
    output, auxiliary, dropped = mixture(tokens, *weights, moe.top_k, capacity)
    loss = (output * torch.cat([target for _, target in parts])).sum() / max(len(tokens), 1)
    (loss + coefficient * auxiliary).backward()
    return output, auxiliary, [one.grad for one in (tokens, *weights)], dropped


def step(moe, parts, rank, coefficient=COEFFICIENT):
    """Forward and backward on a rank: (output, auxiliary loss, gradient of its tokens)."""
    tokens, target = parts[rank]
    tokens = tokens.clone().requires_grad_()
    output, auxiliary = moe(tokens)
    loss = (output * target).sum() / max(sum(len(own) for own, _ in parts), 1)
    (loss + coefficient * auxiliary).backward()
    return output.detach(), auxiliary.detach(), tokens.grad


def apart(given, expected):
    return (given - expected).abs().max().item() if given.numel() else 0.0


def beside_one_process(ranks, sizes, top_k, factor, dtype=torch.float64, skew=None):
    """The largest difference of anything, and how many choices were dropped."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    moe, parts = layer(group, top_k, factor, dtype), shares(sizes[:ranks], dtype)
    if skew is not None:
        for tokens, _ in parts:
            tokens[:, 0] = 9.0
        with torch.no_grad():
            moe.router.weight[:, 0] = torch.tensor(skew, dtype=dtype)
    exact = [part.double() for part in parts]
    double = layer(group, top_k, factor)
    double.load_state_dict(moe.state_dict())
    output, auxiliary, grads, dropped = one_process(double, group, exact)
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    given, loss, to_tokens = step(moe, parts, rank)
    sum_gradients(moe, group)
    own = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    pairs = [
        (given, output[rows]),
        (loss, auxiliary),
        (to_tokens, grads[0][rows]),
        (moe.router.weight.grad, grads[1]),
        (moe.up.grad, grads[2][own]),
        (moe.down.grad, grads[3][own]),
    ]
    assert all(one.dtype == dtype and one.shape == other.shape for one, other in pairs)
    here = sum(rows.start <= token < rows.stop for token, _ in dropped)
    assert moe.plan.dropped == here
    return max(apart(one.double(), other) for one, other in pairs), here


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_dropless_equals_one_process(five, ranks, top_k):
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        results = five.call(beside_one_process, ranks, SIZES, top_k, None, dtype)[:ranks]
        assert max(difference for difference, _ in results) <= bound
        assert not any(dropped for _, dropped in results)
