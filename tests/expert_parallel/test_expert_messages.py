"""What a mixture of experts sends, counted on ranks; its exchange and products by themselves."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch.nn import functional as F

from naranhi import costs
from naranhi.autograd import Recompute
from naranhi.expert_parallel import ExpertsMLP, MoE, exchange_rows, grouped_mm, sum_gradients
from naranhi.measure import wire_bytes

# --- the all-to-all of uneven blocks -------------------------------------------------------------


def exchanged(ranks, dtype):
    """Row k that rank i sends to rank j is numbered (i, j, k); some blocks are empty."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return

    def count(sender, receiver):
        return (sender * 3 + receiver * 2) % 4

    def rows(sender, receiver):
        return [[sender, receiver, k] for k in range(count(sender, receiver))]

    def stacked(blocks):
        return torch.tensor([row for block in blocks for row in block], dtype=dtype).view(-1, 3)

    peers = range(ranks)
    own = stacked(rows(rank, peer) for peer in peers).requires_grad_()
    sent, received = [count(rank, one) for one in peers], [count(one, rank) for one in peers]
    arrived = exchange_rows(own, sent, received, group)
    assert torch.equal(arrived, stacked(rows(peer, rank) for peer in peers))
    # Each row's gradient comes from where the row went; and so does the gradient's gradient.
    (gradient,) = torch.autograd.grad((arrived * (rank + 1)).square().sum(), own, create_graph=True)
    to = stacked([[peer + 1] * 3 for _ in range(sent[peer])] for peer in peers)
    assert torch.equal(gradient, 2 * own * to**2)
    (second,) = torch.autograd.grad(gradient.sum(), own)
    assert torch.equal(second, 2 * to**2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_row_arrives_and_its_gradient_returns(five, ranks):
    for dtype in (torch.float64, torch.bfloat16):
        five.call(exchanged, ranks, dtype)


# --- a product for each expert -------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [0, 0, 0, 8], [0, 0, 0, 0]])
def test_grouped_products_are_torchs(sizes):
    torch.manual_seed(0)
    weights = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)
    output = grouped_mm(rows, weights, sizes)
    expected = torch.cat([own @ one for own, one in zip(rows.split(sizes), weights, strict=True)])
    assert torch.equal(output, expected)
    target = torch.randn_like(output)
    given = torch.autograd.grad((output * target).sum(), (rows, weights))
    wanted = torch.autograd.grad((expected * target).sum(), (rows, weights))
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-15)
    if sum(sizes):  # torch's own kernel has float32 only, and needs aligned rows
        wide = torch.randn(sum(sizes), 8), torch.randn(4, 8, 16)
        offsets = torch.tensor(sizes).cumsum(0).int()
        theirs = F.grouped_mm(*wide, offs=offsets)
        torch.testing.assert_close(grouped_mm(*wide, sizes), theirs, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="sizes for 3 weights, with a sum of 1 for"):
        grouped_mm(torch.randn(2, 3), torch.randn(3, 3, 5), [1, 0, 0])


# --- bytes and messages --------------------------------------------------------------------------

HIDDEN, FFN, EXPERTS, TOP_K = 64, 8, 12, 2


def counted(ranks, tokens, even):
    """(bytes on the wire, collectives with their rows sent, rows from each rank to each)"""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    torch.manual_seed(0)
    moe = MoE(HIDDEN, FFN, EXPERTS, TOP_K, group)
    own = torch.randn(tokens, HIDDEN)
    if even:  # token t has experts t and t + 1, in turn
        own = F.one_hot(torch.arange(tokens) % EXPERTS, HIDDEN).float()
        with torch.no_grad():
            moe.router.weight.zero_()
            for expert in range(EXPERTS):
                moe.router.weight[expert, expert] = 2.0
                moe.router.weight[expert, (expert - 1) % EXPERTS] = 1.0
    own.requires_grad_()
    calls, original = [], dist.all_to_all_single

    def counting(output, input, received, sent, group):
        calls.append(sum(sent) - sent[rank])
        return original(output, input, received, sent, group)

    moe(own)[0].sum().backward()  # connections are made
    dist.barrier(group)
    dist.all_to_all_single = counting
    try:
        before = wire_bytes()
        moe(own)[0].sum().backward()
        after = wire_bytes()
    finally:
        dist.all_to_all_single = original
    rows = [None] * ranks
    dist.all_gather_object(rows, moe.plan.sent, group=group)
    return after - before, calls, rows


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("even", [True, False])
def test_bytes_and_messages_are_the_formulas(five, ranks, even):
    tokens = 240
    results = five.call(counted, ranks, tokens, even)[:ranks]
    for rank, (sent, calls, rows) in enumerate(results):
        counts = costs.moe_count_bytes_sent(EXPERTS, TOP_K, ranks)
        formula = costs.moe_rows_sent(rows, rank) * HIDDEN * 4
        if even:
            assert formula == costs.moe_bytes_sent(tokens, HIDDEN, TOP_K, ranks)
        assert len(calls) == costs.MOE_EXCHANGES
        assert sum(calls) * HIDDEN * 4 == formula
        assert sent == pytest.approx(formula + counts, rel=0.02)


def gradients_counted(ranks):
    """The elements all-reduced over all ranks, of a layer whose experts have no copies."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    torch.manual_seed(0)
    moe = MoE(HIDDEN, 128, EXPERTS, TOP_K, group)
    moe(torch.randn(8, HIDDEN))[0].sum().backward()
    dist.barrier(group)
    before = wire_bytes()
    sum_gradients(moe, group)
    return wire_bytes() - before, 4 * moe.router.weight.numel(), 4 * moe.up.numel()


def test_only_the_routers_gradient_is_sent(five):
    for sent, router, experts in five.call(gradients_counted, 2)[:2]:
        assert router <= sent < 2 * router < experts / 10


def recomputed(rows):
    """Whether a recomputed mixture has the gradients of one that is kept, where one rank's only row
    is a view of what the tensor group shares, and the other rank's rows are not."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    if rank >= 4:
        return None
    tensor, experts = pairs[rank // 2], pairs[2 + rank % 2]
    grads = []
    for wrap in (lambda one: one, Recompute):
        torch.manual_seed(0)
        mlp = ExpertsMLP(MoE(4, 4, 2, 1, experts, replicas=tensor), coefficient=0.1, tensor=tensor)
        torch.manual_seed(1)
        x = torch.randn(4, 6, 4)[: rows[rank // 2]].clone().requires_grad_()
        wrap(mlp)(x).square().sum().backward()
        grads.append([x.grad, mlp.moe.up.grad])
    return all(map(torch.equal, *grads))


@pytest.mark.parametrize("rows", [(1, 2), (2, 1), (2, 2)])
def test_ranks_with_other_numbers_of_rows_recompute_a_mixture(five, rows):
    assert five.call(recomputed, rows)[:4] == [True] * 4
