"""A mixture of experts on real ranks, against one process that has all tokens and all experts."""

import math

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_experts import mixture

from naranhi.expert_parallel import ExpertsMLP, MoE, sum_gradients
from naranhi.precision import LossScaler

HIDDEN, FFN, EXPERTS = 6, 10, 12  # 1 to 4 ranks divide the experts
COEFFICIENT = 0.3  # of the auxiliary loss: large, so that nobody can miss it
SIZES = [9, 5, 0, 4]  # tokens of each rank: uneven, and none on one


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
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in (tokens, *weights)]
    return output, auxiliary, grads, dropped


def loads_with_and_without_autocast():
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    moe, loads = layer(group, dtype=torch.float32), []
    torch.manual_seed(dist.get_rank())
    tokens = torch.randn(2000, HIDDEN)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            moe(tokens)
        loads.append(moe.load.tolist())
    return loads


def test_autocast_does_not_change_where_tokens_go(five):
    for usual, autocast in five.call(loads_with_and_without_autocast)[:2]:
        assert autocast == usual


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


@pytest.mark.parametrize("factor", [0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_dropping_equals_one_process(five, ranks, factor):
    """The same choices are dropped, whatever rank a token is on, and add nothing."""
    for top_k in (1, 2, 3):
        results = five.call(beside_one_process, ranks, SIZES, top_k, factor)[:ranks]
        assert max(difference for difference, _ in results) <= 1e-14
        dropped = sum(here for _, here in results)
        choices = top_k * sum(SIZES[:ranks])
        assert 0 < dropped < choices
        if factor < 1:
            assert choices - dropped <= EXPERTS * math.ceil(factor * choices / EXPERTS)


# --- extreme routings ----------------------------------------------------------------------------

ONE_EXPERT = [-9.0] * 7 + [9.0] + [-9.0] * 4
EXTREME = {
    "all to one expert": (SIZES, ONE_EXPERT),
    "all to one, tokens on one rank": ([0, 7, 0, 0], ONE_EXPERT),
    "all to one rank": (SIZES, [-9.0] * 9 + [9.0] * 3),
    "no token on the first ranks": ([0, 0, 0, 3], None),
    "no token at all": ([0, 0, 0, 0], None),
}


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_routings_are_right(five, name):
    sizes, skew = EXTREME[name]
    for factor in (None, 0.5):
        for top_k in (1, 2):
            results = five.call(beside_one_process, 4, sizes, top_k, factor, torch.float64, skew)
            assert max(difference for difference, _ in results[:4]) <= 1e-13
            if factor and skew and top_k == 1 and "expert" in name:
                tokens = sum(sizes)
                kept = tokens - sum(here for _, here in results[:4])
                assert kept == math.ceil(0.5 * tokens / EXPERTS)


# --- two axes: experts divided over one, copied over the other -----------------------------------


def on_two_axes(top_k, factor):
    """On 4 ranks, two copies of experts that two ranks share: the largest difference."""
    rank, world = dist.get_rank(), first_ranks(4)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    if rank >= 4:
        return None
    group, replicas = groups[rank // 2], groups[2 + rank % 2]
    moe, parts = layer(group, top_k, factor, replicas=replicas), shares(SIZES)
    output, auxiliary, grads, dropped = one_process(moe, group, parts)
    rows = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    own = slice(rank % 2 * 6, rank % 2 * 6 + 6)
    given, loss, to_tokens = step(moe, parts, rank)
    sum_gradients(moe, world)
    assert moe.plan.dropped == sum(rows.start <= token < rows.stop for token, _ in dropped)
    assert not factor or dropped
    return max(
        apart(given, output[rows]),
        apart(loss, auxiliary),
        apart(to_tokens, grads[0][rows]),
        apart(moe.router.weight.grad, grads[1]),
        apart(moe.up.grad, grads[2][own]),
        apart(moe.down.grad, grads[3][own]),
    )


@pytest.mark.parametrize("factor", [None, 0.5])
def test_copies_of_experts_equal_one_process(five, factor):
    for top_k in (1, 2):
        assert max(five.call(on_two_axes, top_k, factor)[:4]) <= 1e-14


# --- wrong ways ----------------------------------------------------------------------------------


def wrong_ways():
    """How far each wrong way is from one process, on two ranks, relative to the largest element."""
    group, rank = first_ranks(2), dist.get_rank()
    singles = [dist.new_group([alone]) for alone in range(2)]
    if rank >= 2:
        return None
    parts, moe = shares(SIZES), layer(group)
    _, auxiliary, grads, _ = one_process(moe, group, parts[:2])
    _, loss, _ = step(moe, parts[:2], rank)

    def relative(given, expected):
        return apart(given, expected) / expected.abs().max().item()

    far = {}
    mean = layer(singles[rank])(parts[rank][0])[1].detach()
    dist.all_reduce(mean, group=group)
    far["auxiliary loss of each rank"] = relative(mean / 2, auxiliary)
    own = slice(rank * 6, rank * 6 + 6)
    averaged = moe.up.grad.clone()
    dist.all_reduce(averaged, group=group)
    far["experts averaged over their group"] = relative(averaged / 2, grads[2][own])
    far["router not summed"] = relative(moe.router.weight.grad, grads[1])
    sum_gradients(moe, group)
    far["right"] = max(
        relative(loss, auxiliary),
        relative(moe.up.grad, grads[2][own]),
        relative(moe.router.weight.grad, grads[1]),
    )
    return far


def test_wrong_ways_are_far_from_one_process(five):
    for far in five.call(wrong_ways)[:2]:
        assert far.pop("right") <= 1e-14
        assert min(far.values()) > 0.01, far


# --- does a token's output depend on the other tokens? -------------------------------------------


def with_and_without_others(factor):
    """How far outputs of rank 1's tokens change when rank 0's tokens are others, and more."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    moe, own = layer(group, 2, factor), shares([3, 6])[1][0]
    outputs = []
    for others in shares([3, 6])[0][0], shares([40])[0][1]:
        outputs.append(moe(own if rank == 1 else others)[0].detach())
    return apart(outputs[0], outputs[1]) if rank == 1 else 0.0


def test_only_a_capacity_makes_tokens_depend_on_others(five):
    assert max(five.call(with_and_without_others, None)[:2]) <= 1e-15
    assert max(five.call(with_and_without_others, 0.5)[:2]) > 0.01


def in_bfloat16():
    """The router decides in float32: the same experts as a float32 layer of the same weights."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    parts = shares([200, 100], torch.bfloat16)
    half = layer(group, 2, dtype=torch.bfloat16)
    wide = layer(group, 2, dtype=torch.float32)
    wide.load_state_dict(half.state_dict())
    output, auxiliary, _ = step(half, parts, rank)
    expected, loss, _ = step(wide, [part.float() for part in parts], rank)
    assert output.dtype == torch.bfloat16 and auxiliary.dtype == torch.float32
    assert torch.equal(half.load, wide.load) and auxiliary == loss
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)


def test_the_router_decides_in_float32(five):
    five.call(in_bfloat16)


def with_a_loss_scale():
    """The router's gradient without a loss scale, and with one that `coefficient` has too."""
    group, rank, gradients = first_ranks(2), dist.get_rank(), []
    if rank >= 2:
        return None
    for scale in (1.0, 2.0**10):
        scaler, mlp = LossScaler(scale), ExpertsMLP(layer(group), coefficient=COEFFICIENT)
        mlp.coefficient *= scaler.scale
        (mlp(shares(SIZES)[rank][0][None]).square().sum() * scaler.scale).backward()
        scaler.unscale_([param.grad for param in mlp.parameters()])
        gradients.append(mlp.moe.router.weight.grad)
    return gradients


def test_the_coefficient_is_read_in_each_forward_and_follows_a_loss_scale(five):
    for plain, scaled in five.call(with_a_loss_scale)[:2]:
        assert torch.equal(plain, scaled)


def on_another_default_device():
    """Output and gradient of a step; inside, new tensors are on the meta device by default."""
    group, rank, results = first_ranks(2), dist.get_rank(), []
    if rank >= 2:
        return None
    for device in ("cpu", "meta"):
        moe, tokens = layer(group), shares(SIZES)[rank][0].requires_grad_()
        with torch.device(device):
            output, auxiliary = moe(tokens)
            (output.square().sum() + auxiliary).backward()
        results.append([output.detach(), tokens.grad, moe.router.weight.grad, moe.up.grad])
    return results


def test_the_default_device_does_not_matter(five):
    for expected, found in five.call(on_another_default_device)[:2]:
        assert all(map(torch.equal, expected, found))


def hooks_of_the_router():
    """Which hooks of the router run; how far the output moves by logits that one changes."""
    torch.manual_seed(0)
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    moe, seen = MoE(4, 8, 4, 2, group), []
    tokens = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    plain, _ = moe(tokens)
    moe.router.register_forward_pre_hook(lambda *_: seen.append("before"))
    moe.router.register_full_backward_hook(lambda *_: seen.append("backward"))
    moe.router.register_forward_hook(lambda module, inputs, logits: -logits)
    output, _ = moe(tokens)
    output.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe.router(tokens).dtype == torch.float32
    return seen, (output - plain).abs().max().item()


def test_hooks_of_the_router_run(five):
    for seen, change in five.call(hooks_of_the_router)[:2]:
        assert seen == ["before", "backward", "before"] and change > 1e-2
