"""Experts under autocast compute, and send, in its dtype; gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch.nn import functional as F

from naranhi.expert_parallel import MoE, sum_gradients

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 16, 24, 4, 2, 64


def plainly(tokens, router, up, down):
    """The output of all experts in one process, as autocast computes it without a Function."""
    with torch.autocast("cpu", enabled=False):
        gates, chosen = F.linear(tokens.float(), router).softmax(-1).topk(TOP_K)
        gates = gates / gates.sum(-1, keepdim=True)
    experts = zip(up, down, strict=True)
    results = torch.stack([F.gelu(tokens @ one) @ other for one, other in experts], 1)
    return (results.gather(1, chosen[..., None].expand(-1, -1, HIDDEN)) * gates[..., None]).sum(1)


def under_autocast(given):
    """(dtypes of output, gradients and messages; by what, how far it is from one process's)."""
    group, rank = first_ranks(2), dist.get_rank()
    singles = [dist.new_group([single]) for single in range(2)]
    if rank >= 2:
        return None
    torch.manual_seed(0)
    one = MoE(HIDDEN, FFN, EXPERTS, TOP_K, singles[rank])
    torch.manual_seed(0)
    moe = MoE(HIDDEN, FFN, EXPERTS, TOP_K, group)
    whole, target = torch.randn(TOKENS, HIDDEN).to(given).requires_grad_(), torch.randn(TOKENS, 1)
    own, part = whole.detach().chunk(2)[rank].requires_grad_(), target.chunk(2)[rank]
    sent, original = [], dist.all_to_all_single

    def noted(output, rows, *others):
        sent.append(rows.dtype)
        return original(output, rows, *others)

    dist.all_to_all_single = noted
    try:
        with torch.autocast("cpu", torch.bfloat16):
            output, _ = moe(own)
        (output * part).sum().backward()
    finally:
        dist.all_to_all_single = original
    sum_gradients(moe, group)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plainly(whole, one.router.weight, one.up, one.down)
    (expected * target).sum().backward()
    here, experts = slice(rank * 32, rank * 32 + 32), slice(rank * 2, rank * 2 + 2)
    pairs = {
        "output": (output, expected[here]),
        "tokens": (own.grad, whole.grad[here]),
        "router": (moe.router.weight.grad, one.router.weight.grad),
        "up": (moe.up.grad, one.up.grad[experts]),
        "down": (moe.down.grad, one.down.grad[experts]),
    }
    apart = {
        what: ((one - other).float().norm() / other.float().norm()).item()
        for what, (one, other) in pairs.items()
    }
    return {what: found.dtype for what, (found, _) in pairs.items()} | {"sent": {*sent}}, apart


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_experts_compute_in_autocasts_dtype(five, given):
    for dtypes, apart in five.call(under_autocast, given)[:2]:
        assert dtypes["output"] == torch.bfloat16 and dtypes["sent"] == {torch.bfloat16}
        assert dtypes["tokens"] == given
        assert {dtypes[name] for name in ("router", "up", "down")} == {torch.float32}
        assert max(apart.values()) < 0.02, apart


def on_one_rank_only():
    """The error of a step that is under autocast on rank 1 alone."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    moe = MoE(HIDDEN, FFN, EXPERTS, TOP_K, group)
    with (
        pytest.raises(ValueError) as error,
        torch.autocast("cpu", torch.bfloat16, enabled=rank == 1),
    ):
        moe(torch.randn(4, HIDDEN))
    return str(error.value)


def test_autocast_on_one_rank_only_is_refused(five):
    first, second = five.call(on_one_rank_only)[:2]
    assert first == second and "torch.float32" in first and "torch.bfloat16" in first
