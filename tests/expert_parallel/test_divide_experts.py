"""Mixtures of transformers (Mixtral, Qwen3-MoE), their experts divided over ranks."""

import copy

import pytest
import small_llama
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from transformers import AutoModelForCausalLM

from naranhi import models
from naranhi.expert_parallel import (
    ExpertsMLP,
    MoE,
    auxiliary_loss,
    divide_experts,
    divided_state,
    sum_gradients,
    undivided_state,
)
from naranhi.tensor_parallel import full_state_dict, llama_plan, materialize, parallelize

KINDS = "mixtral", "qwen3_moe"


def error_of(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"


def model_of(kind, **more):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_llama.config(kind, **more)).double().train()
    model.set_experts_implementation("eager")  # its kernels have no float64
    return model


def rows_of(rank, ranks):
    tokens = torch.arange(4 * 24).view(4, 24) ** 2 % 509
    return tokens.chunk(ranks)[rank]


def beside_transformers(kind, ranks, copies, more):
    """How far logits and gradients are, relative to the largest, and which have none."""
    group, rank = first_ranks(ranks), dist.get_rank()
    pairs = [dist.new_group(one) for one in ([0, 1], [2, 3], [0, 2], [1, 3])]
    if rank >= ranks:
        return None
    axes = (pairs[rank // 2], pairs[2 + rank % 2]) if copies else (group, None)
    model = model_of(kind, **more)
    expected = model(rows_of(0, 1)).logits
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weights).sum().backward()
    grads = {name: param.grad for name, param in model.named_parameters()}

    layers = nn.ModuleList(models.llama_layers(copy.deepcopy(model)))
    divide_experts(layers, axes[0], replicas=axes[1])
    logits = nn.Sequential(*layers)(rows_of(rank, ranks))
    apart = [logits - expected.chunk(ranks)[rank]]
    (logits * weights.chunk(ranks)[rank]).sum().backward()
    sum_gradients(layers, group)
    for param in layers.parameters():
        param.data = param.grad
    found = undivided_state(full_state_dict(layers))
    back = models.llama_model(found, model.config).state_dict()
    # (With one expert, whose gate is always 1, the router's gradient is zero but for rounding.)
    apart += [(back[name] - g) / g.abs().max().clamp(min=0.1) for name, g in grads.items()]
    return max(x.abs().max().item() for x in apart), len(grads)


@pytest.mark.parametrize("ranks, copies", [(1, False), (2, False), (4, False), (4, True)])
@pytest.mark.parametrize(
    "kind, more",
    [
        ("mixtral", {}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_ranks_compute_what_transformers_does(five, kind, more, ranks, copies):
    """Up to its rounding of norms and probabilities to float32."""
    for apart, parameters in five.call(beside_transformers, kind, ranks, copies, more)[:ranks]:
        assert apart < 2e-5
        assert parameters == {"mixtral": 21, "qwen3_moe": 25}[kind]


def auxiliary_beside_transformers(coefficient):
    """Of one sparse block: the loss, and the gradient of its router."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = model_of("qwen3_moe")
    layers = nn.ModuleList(models.llama_layers(copy.deepcopy(model)))
    expected = model(rows_of(0, 1), output_router_logits=True).aux_loss
    (coefficient * expected).backward()
    config, router = model.config, model.model.layers[1].mlp.gate.weight.grad
    divide_experts(layers, group)
    nn.Sequential(*layers)(rows_of(rank, 2))
    found = config.num_experts_per_tok * auxiliary_loss(layers)
    (coefficient * found).backward()
    sum_gradients(layers, group)
    grad = layers[2].mlp.moe.router.weight.grad
    return expected.item(), found.item(), (grad - router).abs().max().item(), router.abs().max()


def test_the_auxiliary_loss_is_that_of_transformers(five):
    for expected, found, apart, size in five.call(auxiliary_beside_transformers, 0.5)[:2]:
        assert found == pytest.approx(expected, rel=1e-6) and found > 1.01 * 3
        assert apart < 1e-6 < 1e-4 < size


def from_shards(filled, state):
    """On a rank: whether weights are the same when they are filled from this rank's experts."""
    later, moe = copy.deepcopy(filled).to("meta"), filled[2].mlp.moe
    experts = {f"2.mlp.moe.{name}" for name in ("up", "down")}
    own = slice(moe.own.start, moe.own.stop)
    shards = {name: state[name][own] if name in experts else state[name] for name in state}
    with pytest.raises(ValueError, match=r"2.mlp.moe.up has shape .* in the state"):
        materialize(later, state, shards=experts)
    materialize(later, shards, shards=experts)
    params = zip(filled.parameters(), later.parameters(), strict=True)
    return all(torch.equal(*pair) and pair[1].is_contiguous() for pair in params)


def without_values(kind):
    """On a rank: whether layers that get values later are those that had them all along."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    whole = nn.ModuleList(models.llama(small_llama.config(kind)))
    state = copy.deepcopy(whole.state_dict())
    later = copy.deepcopy(whole).to("meta")
    for layers in whole, later:
        layers[2].mlp.gate.weight.requires_grad_(False)
        divide_experts(layers, group)
    meta = [param.is_meta for param in later.parameters()]
    materialize(later, divided_state(state))
    same = all(
        torch.equal(one, other)
        for one, other in zip(whole.parameters(), later.parameters(), strict=True)
    )
    frozen = [name for name, param in later.named_parameters() if not param.requires_grad]
    same &= from_shards(copy.deepcopy(whole), divided_state(state))
    own = later[2].mlp.moe.up
    back = undivided_state(full_state_dict(later))
    returned = back.keys() == state.keys() and all(torch.equal(back[n], state[n]) for n in state)
    return all(meta), same, frozen, tuple(own.shape), own.is_contiguous(), returned


@pytest.mark.parametrize("kind", KINDS)
def test_values_may_come_later(five, kind):
    shape = {"mixtral": (2, 16, 80), "qwen3_moe": (4, 16, 48)}[kind]
    frozen = ["2.mlp.moe.router.weight"]
    for found in five.call(without_values, kind)[:2]:
        assert found == (True, True, frozen, shape, True, True)


def under_autocast():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    layers = divide_experts(models.llama(small_llama.config("mixtral")), group)
    moe = layers[1].mlp.moe
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = moe(torch.randn(6, 16))
    output.sum().backward()
    return output.dtype, moe.up.grad.dtype


def test_gates_compute_under_autocast(five):
    for dtypes in five.call(under_autocast)[:2]:
        assert dtypes == (torch.bfloat16, torch.float32)


def refused():
    """On two ranks: what is said of layers that cannot be divided, and whether they changed."""
    group, rank = first_ranks(2), dist.get_rank()
    singles = [dist.new_group([one]) for one in range(2)]
    if rank >= 2:
        return None
    found = {}

    def said(words, change=lambda layers: None, *groups, kind="mixtral", **options):
        torch.manual_seed(0)
        layers = models.llama(small_llama.config(kind))
        with torch.no_grad():
            change(layers)
        blocks = [layer.mlp for layer in layers[1:-1]]
        found[words] = error_of(lambda: divide_experts(layers, *(groups or [group]), **options))
        assert [layer.mlp for layer in layers[1:-1]] == blocks, words

    def other(place):
        return lambda layers: layers[place].mlp.experts.down_proj.add_(rank)

    def with_hook(layers):
        if rank:
            layers[2].mlp.experts.register_forward_hook(print)

    def with_parameter_hook(layers):
        if rank:
            layers[2].mlp.gate.weight.requires_grad_().register_hook(print)

    def with_another(layers):
        if rank:
            layers[2].mlp.shared = nn.Linear(2, 2)

    def dense(layers):
        if rank:
            for layer in layers[1:-1]:
                layer.mlp = nn.Identity()

    both = "rank 0 and rank 1 have different mixtures of experts"
    said(both, other(2))
    said(both + " ", other(1), singles[rank], replicas=group)
    said("the forward hook print would be lost", with_hook)
    said("gate.weight of layer 2 has a hook, which would be lost", with_parameter_hook)
    said("has experts.down_proj, experts.gate_up_proj, gate.weight, shared.bias", with_another)
    said("rank 1: among 4 layers there is no block with experts", dense)
    said("among 4 layers there is no block with experts", kind="llama")
    said("`replicas` must include these ranks", lambda layers: None, singles[rank], tensor=group)
    for words, options in (
        ("gate: SiLU() on rank 0, NoneType on rank 1", {"gate": None if rank else nn.SiLU()}),
        ("normalize: False on rank 0, True on rank 1", {"normalize": bool(rank)}),
        ("top_k=3 experts for a token, but the layer has 2", {"top_k": 3}),
    ):
        found[words] = error_of(
            lambda given=options: MoE(**{"top_k": 1} | given, **SMALL, group=group)
        )
    try:
        MoE(**SMALL, top_k=1, group=group, gate=nn.functional.silu)
    except TypeError as error:
        found["gate must be a module, such as nn.SiLU(), or None, not <function"] = str(error)
    mixture = models.llama(small_llama.config("qwen3_moe"))
    plan = llama_plan(head_norms=True)
    found["2 has a mixture of experts, which would get the gradient"] = error_of(
        lambda: parallelize(mixture, plan, group, sequence=True)
    )
    return found


SMALL = {"hidden": 4, "ffn": 4, "experts": 2}


def test_what_cannot_be_divided_is_refused_on_every_rank(five):
    for found in five.call(refused)[:2]:
        assert len(found) == 13
        for words, message in found.items():
            assert words.strip() in message


def half_in_bf16():
    """On a rank: dtypes of a router in float32 and its experts in bfloat16, and of the output."""
    group = first_ranks(1)
    if dist.get_rank():
        return None
    layers = models.llama(small_llama.config("mixtral"))
    layers[1].mlp.experts.bfloat16()
    moe = divide_experts(layers, group)[1].mlp.moe
    output, _ = moe(torch.randn(3, 16, dtype=torch.bfloat16))
    return moe.router.weight.dtype, moe.up.dtype, output.dtype


def test_router_and_experts_may_have_other_dtypes(five):
    assert five.call(half_in_bf16)[0] == (torch.float32, torch.bfloat16, torch.bfloat16)


def test_a_block_has_its_experts_once(five):
    """Divided layers have none left to divide."""
    said, kinds = five.call(divided_twice)[0]
    assert "there is no block with experts" in said
    assert kinds == [ExpertsMLP, ExpertsMLP]


def divided_twice():
    group = first_ranks(1)
    if dist.get_rank():
        return None
    layers = divide_experts(models.llama(small_llama.config("mixtral")), group)
    kinds = [type(layer.mlp) for layer in layers[1:-1]]
    return error_of(lambda: divide_experts(layers, group)), kinds
