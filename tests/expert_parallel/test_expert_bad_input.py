"""What a mixture of experts refuses, in words, on every rank, before a token is sent."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from naranhi import models
from naranhi.autograd import Recompute
from naranhi.expert_parallel import (
    ExpertsMLP,
    MoE,
    auxiliary_loss,
    exchange_rows,
    moe,
    sum_gradients,
)
from naranhi.tensor_parallel import mlp_plan, parallelize

HIDDEN, FFN, EXPERTS = 4, 6, 4


def error_of(function):
    """The message of the ValueError, and how many all-to-alls went before it."""
    calls, original = [], dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: calls.append(args)
    try:
        function()
    except ValueError as error:
        return str(error), len(calls)
    finally:
        dist.all_to_all_single = original
    return "no error", len(calls)


def made(differs, changes):
    """Errors of making a layer on two ranks, with changes on rank 1 alone if it `differs`."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    options = {"hidden": HIDDEN, "ffn": FFN, "experts": EXPERTS, "top_k": 2}
    options |= changes if rank == 1 or not differs else {}
    torch.manual_seed(options.pop("seed", 0))
    return error_of(lambda: MoE(**options, group=group))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"top_k": 5}, "top_k=5 experts for a token, but the layer has 4"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, not 0"),
        ({"experts": 5}, "2 ranks do not divide 5 experts"),
        ({"capacity_factor": 0}, "capacity_factor must be positive and finite, or None to drop"),
        ({"capacity_factor": -1.0}, "capacity_factor must be positive and finite, or None to drop"),
        ({"capacity_factor": float("nan")}, "capacity_factor must be positive and finite, or None"),
        ({"capacity_factor": "1"}, "capacity_factor must be a number or None, not '1'"),
        ({"hidden": 4.0}, "hidden must be a whole number of at least 1, not 4.0"),
        ({"ffn": True}, "ffn must be a whole number of at least 1, not True"),
    ],
)
def test_layers_that_cannot_be(five, changes, words):
    for message, sent in five.call(made, False, changes)[:2]:
        assert message.startswith(words) and sent == 0


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden": 8}, "hidden: 4 on rank 0, 8 on rank 1"),
        ({"capacity_factor": 1.0}, "capacity factor: None on rank 0, 1.0 on rank 1"),
        ({"top_k": 9}, "top k: 2 on rank 0, 9 on rank 1"),
        ({"seed": 1}, "rank 0 and rank 1 have different router"),
    ],
)
def test_ranks_that_do_not_agree(five, changes, words):
    for message, _ in five.call(made, True, changes)[:2]:
        assert message.startswith(words)


def other_copies():
    """Errors of making a layer on two ranks with copies, where rank 1 has drawn another expert."""
    group, rank = first_ranks(2), dist.get_rank()
    singles = [dist.new_group([one]) for one in range(2)]
    if rank >= 2:
        return None
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        drawn = moe._drawn
        patch.setattr(moe, "_drawn", lambda *sizes: drawn(*sizes) + 1e-6 * rank)
        return error_of(lambda: MoE(HIDDEN, FFN, EXPERTS, 2, singles[rank], replicas=group))


def test_copies_that_are_not_equal(five):
    for message, _ in five.call(other_copies)[:2]:
        assert message == "rank 0 and rank 1 have different experts"


TOKENS = {
    "nan": (lambda x: x * float("nan"), "on rank 1: tokens, or the router's weights, are NaN"),
    "infinite": (lambda x: x / 0, "on rank 1: tokens, or the router's weights, are NaN"),
    "nothing": (
        lambda x: None,
        "on rank 1: tokens must be a tensor of shape (tokens, 4), not <class 'NoneType'>",
    ),
    "hidden": (lambda x: x[:, :3], "on rank 1: tokens must have shape (tokens, 4), not (3, 3)"),
    "sequence": (lambda x: x[None], "on rank 1: tokens must have shape (tokens, 4), not (1, 3, 4)"),
    "dtype": (
        lambda x: x.double(),
        "on rank 1: tokens are torch.float64 on cpu, the experts torch.float32 on cpu",
    ),
    "gradient": (
        lambda x: x.clone().requires_grad_(),
        "the ranks' tokens differ. Rank 0: torch.float32, do not need a gradient, experts are "
        "trained, operations are recorded. Rank 1: torch.float32, need a gradient, operations are "
        "recorded",
    ),
}


def given(name, copies):
    """Errors of a forward on two ranks, of which rank 1 has the wrong tokens; or with copies."""
    group, rank = first_ranks(2), dist.get_rank()
    singles = [dist.new_group([one]) for one in range(2)]
    if rank >= 2:
        return None
    torch.manual_seed(0)
    axes = {"group": singles[rank], "replicas": group} if copies else {"group": group}
    layer, tokens = MoE(HIDDEN, FFN, EXPERTS, 2, **axes), torch.ones(3, HIDDEN)
    found = error_of(lambda: layer(TOKENS[name][0](tokens) if rank == 1 else tokens))
    layer(tokens)[0].sum().backward()  # and the next step is well
    return found


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_that_are_wrong_on_one_rank(five, name, copies):
    for message, sent in five.call(given, name, copies)[:2]:
        assert message.startswith(TOKENS[name][1]) and sent == 0


def one_dtype_here_another_there():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    dtype = [torch.float32, torch.bfloat16][rank]
    moe = MoE(HIDDEN, FFN, EXPERTS, 2, group).to(dtype)
    return error_of(lambda: moe(torch.ones(3, HIDDEN, dtype=dtype)))


def test_ranks_with_other_dtypes(five):
    for message, sent in five.call(one_dtype_here_another_there)[:2]:
        assert "torch.float32, do not need" in message and "torch.bfloat16, do not" in message
        assert sent == 0


def experts_frozen_on_one_rank():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    layer, tokens = MoE(HIDDEN, FFN, EXPERTS, 2, group), torch.ones(3, HIDDEN)
    layer.up.requires_grad_(rank == 0), layer.down.requires_grad_(rank == 0)
    found = error_of(lambda: layer(tokens))
    # Tokens that need a gradient send one back through frozen experts, too.
    layer(tokens.clone().requires_grad_())[0].sum().backward()
    return found


def test_experts_frozen_on_one_rank(five):
    for message, sent in five.call(experts_frozen_on_one_rank)[:2]:
        first, second = message.split(" Rank 1: ")
        assert "experts are trained, operations are recorded" in first
        assert "experts are frozen, operations are recorded" in second and sent == 0


def uneven_numbers():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    return [
        error_of(partial(exchange_rows, torch.ones(3, 2), sent, [1, 2], group))
        for sent in ([1, 1], [1, 1, 1])
    ]


def test_rows_that_are_not_there(five):
    for errors in five.call(uneven_numbers)[:2]:
        for message, sent in errors:
            assert "for each of 2 ranks, and sent must sum to 3 rows" in message and sent == 0


def test_an_auxiliary_loss_without_experts():
    with pytest.raises(RuntimeError, match="no experts, or has had no forward"):
        auxiliary_loss(torch.nn.Linear(2, 2))


class Reentrant(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=True)


def recomputed(wrap, coefficient):
    """Experts on two ranks after a forward in `wrap`, the loss of which is the output's."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    mlp = ExpertsMLP(MoE(HIDDEN, FFN, EXPERTS, 1, group), coefficient=coefficient)
    loss = wrap(mlp)(torch.linspace(-1, 1, 6 * HIDDEN).view(2, 3, HIDDEN).requires_grad_()).sum()
    return mlp, loss


def no_graph(wrap):
    """What `auxiliary_loss` says in training, and whether it can be read without a gradient."""
    if not (made := recomputed(wrap, None)):
        return None
    mlp, loss = made
    with pytest.raises(RuntimeError) as error:
        auxiliary_loss(mlp)
    with torch.no_grad():
        read = auxiliary_loss(mlp).item()
    loss.backward()
    return str(error.value), read


@pytest.mark.parametrize("wrap", [Recompute, Reentrant])
def test_an_auxiliary_loss_that_would_train_no_router(five, wrap):
    for message, read in five.call(no_graph, wrap)[:2]:
        assert "has no graph" in message and "pass coefficient= to add_experts" in message
        assert read > 0


def by_coefficient(wrap):
    """How far the router's gradient is from that of the loss added without recomputation."""
    if not (made := recomputed(wrap, 1.0)):
        return None
    mlp, loss = made
    loss.backward()
    plain, loss = recomputed(lambda layer: layer, None)
    (loss + auxiliary_loss(plain)).backward()
    return (mlp.moe.router.weight.grad - plain.moe.router.weight.grad).abs().max().item()


@pytest.mark.parametrize("wrap", [Recompute, Reentrant])
def test_a_coefficient_trains_the_router_under_recomputation(five, wrap):
    assert max(five.call(by_coefficient, wrap)[:2]) <= 1e-6


def sums_over_a_tensor_group():
    """The error of summing shards with each other, and which gradients changed all the same."""
    group, rank = first_ranks(2), dist.get_rank()
    singles = [dist.new_group([single]) for single in range(2)]
    if rank >= 2:
        return None
    torch.manual_seed(0)
    model = nn.Sequential(*parallelize(models.mlp(1, HIDDEN, FFN), mlp_plan(), group))
    model(torch.ones(3, HIDDEN)).sum().backward()
    before = [param.grad.clone() for param in model.parameters()]
    message, _ = error_of(lambda: sum_gradients(model, group))
    sum_gradients(model, singles[rank])
    return message, [
        name
        for grad, (name, param) in zip(before, model.named_parameters(), strict=True)
        if not torch.equal(grad, param.grad)
    ]


def test_shards_of_a_tensor_group_are_not_summed_with_each_other(five):
    for rank, (message, changed) in enumerate(five.call(sums_over_a_tensor_group)[:2]):
        assert f"has different shards on rank {1 - rank}, whose gradients belong" in message
        assert not changed
