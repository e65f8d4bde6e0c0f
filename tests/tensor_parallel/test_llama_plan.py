"""The plan for Llama: what a block sends, what a rank holds, and which ranks can share it."""

import pytest
import small_llama
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from naranhi import models
from naranhi.tensor_parallel import (
    Column,
    GroupedHeads,
    Row,
    full_state_dict,
    gpt2_plan,
    llama_plan,
    parallelize,
)


class Collectives(TorchDispatchMode):
    """The name of each collective that is started, and the elements of its tensor."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self.seen.append((operation.overloadpacket.__name__, args[0][0].numel()))
        return operation(*args, **(kwargs or {}))


def llama(kind="qwen3", **more):
    torch.manual_seed(0)
    return models.llama(small_llama.config(kind, **more))


def of_a_block():
    """On a rank of two: what a block sends; how many heads it has; the whole state's difference."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    whole = {name: tensor.clone() for name, tensor in nn.ModuleList(llama()).state_dict().items()}
    layers = parallelize(llama(), llama_plan(head_norms=True), group)
    state = full_state_dict(nn.ModuleList(layers))
    same = state.keys() == whole.keys() and all(torch.equal(state[n], t) for n, t in whole.items())
    x = torch.randn(2, 24, 16, requires_grad=True)
    with Collectives() as forwards:
        y = layers[1](x)
    with Collectives() as backwards:
        y.sum().backward()
    qkv = layers[1].attn.qkv.weight
    return same, forwards.seen, backwards.seen, tuple(qkv.shape), x.numel()


def test_a_block_has_one_all_reduce_each_way_for_attention_and_one_for_its_mlp(five):
    for same, forwards, backwards, shape, elements in five.call(of_a_block)[:2]:
        assert same
        assert forwards == backwards == [("allreduce_", elements)] * 2
        assert shape == (1 * (2 + 2) * 8, 16)  # one of two groups: 2 queries, a key and a value


def refused():
    group, found = first_ranks(2), {}
    if dist.get_rank() >= 2:
        return None

    def attempt(what, layers, plan):
        with pytest.raises((TypeError, ValueError)) as error:
            parallelize(layers, plan, group)
        found[what] = str(error.value)

    attempt("groups", llama(num_key_value_heads=1), llama_plan(head_norms=True))
    attempt("kind", models.mlp(1, 8), {"0": GroupedHeads(), "0.up": Column(), "0.down": Row()})
    attempt("parts", llama("llama"), llama_plan() | {"*.attn.qkv": Column(parts=2)})
    attempt("no norms", llama("llama"), llama_plan(head_norms=True))
    attempt("norms", llama(), llama_plan())
    attempt("another model", llama(), gpt2_plan())
    return found


def test_what_the_plan_does_not_fit_is_refused(five):
    first, second = five.call(refused)[:2]
    assert first == second
    expected = {
        "groups": "1.attn: 2 ranks do not divide 1 heads of keys and values",
        "kind": "0: the plan has to split its qkv as Column(parts=1)",
        "parts": "1.attn: the plan has to split its qkv as Column(parts=1)",
        "norms": "1.attn: it has norms of heads, and the plan is for attention without them: use "
        "llama_plan(head_norms=True)",
        "no norms": "the plan names '*.attn.[qk]_norm', but no layer has such a name",
        "another model": "the plan names '*.attn.c_attn', but no layer has such a name",
    }
    assert first.keys() == expected.keys()
    for what, words in expected.items():
        assert words in first[what], first[what]
