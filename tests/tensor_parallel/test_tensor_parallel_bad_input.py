"""What tensor parallelism refuses: on every rank alike, and before anything is changed or sent."""

import re

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn

from naranhi import models
from naranhi.distributed import agree
from naranhi.tensor_parallel import (
    Column,
    ColumnParallelLinear,
    Heads,
    ParallelAttention,
    Row,
    RowParallelLinear,
    SequenceParallel,
    Vocabulary,
    VocabularyParallelEmbedding,
    full_state_dict,
    gpt2_plan,
    load_full_state_dict,
    mlp_plan,
    parallelize,
    vocabulary_cross_entropy,
)


def gpt2(heads=4, hidden=16, attention="sdpa"):
    torch.manual_seed(0)
    return models.gpt2(models.gpt2_config(10, 12, hidden, heads, 1), True, 0.0, attention)


def mlp(inner=12):
    torch.manual_seed(0)
    return models.mlp(1, 8, inner)


def embedding_only(plan):
    return {pattern: way for pattern, way in plan.items() if pattern != "*lm_head"}


def another_seed():
    layers = mlp()
    if dist.get_rank() == 1:
        layers[0].down.weight.data[0, 0] += 1e-6
    return layers


def plan_of_each_rank():
    return {"*up": Column(), **({"*down": Row()} if dist.get_rank() else {})}


def only_rank_1():
    return mlp_plan() if dist.get_rank() != 1 else {"*sideways": Column()}


def twice():
    layers = mlp()
    return parallelize(layers, mlp_plan(), first_ranks(2))


REFUSED = {  # what is made, its plan, and the message
    "heads": (
        lambda: gpt2(heads=3, hidden=18),
        gpt2_plan,
        "1.block.attn: 2 ranks do not divide 3 heads",
    ),
    "outputs": (lambda: mlp(5), mlp_plan, "0.up: 2 ranks do not divide 5 outputs"),
    "inputs": (lambda: mlp(5), lambda: {"*down": Row()}, "0.down: 2 ranks do not divide 5 inputs"),
    "parts": (
        mlp,
        lambda: {"0.up": Column(parts=4)},
        "0.up: 2 ranks do not divide 12 outputs, in 4 parts",
    ),
    "no such layer": (
        mlp,
        lambda: {"*up": Column(), "0.sideways": Row()},
        "the plan names '0.sideways', but no layer has such a name",
    ),
    "in two patterns": (mlp, lambda: {"*up": Column(), "0.*": Row()}, "0.up is split twice"),
    "again": (twice, lambda: {"*down": Row()}, "0.down is split twice"),
    "no linear layer": (
        gpt2,
        lambda: {"*ln_1": Column()},
        "1.block.ln_1: a Linear or GPT-2's Conv1D is needed, not LayerNorm",
    ),
    "no head": (
        gpt2,
        lambda: {"*c_fc": Vocabulary()},
        "1.block.mlp.c_fc: a Linear is needed, not Conv1D",
    ),
    "a norm made of layers": (
        lambda: [nn.Sequential(nn.LayerNorm(8))],
        lambda: {"0": SequenceParallel()},
        "0: the plan has to name the layers inside it",
    ),
    "heads alone": (
        gpt2,
        lambda: {"*.attn": Heads()},
        r"1.block.attn: the plan has to split its c_attn as Column\(parts=3\)",
    ),
    "half of a tied pair": (
        gpt2,
        lambda: embedding_only(gpt2_plan()),
        "0.wte.weight and 2.lm_head.weight are one parameter: the plan has to "
        "split both alike, or none",
    ),
    "other weights": (
        another_seed,
        mlp_plan,
        "rank 0 and rank 1 start from different weights: 0.down.weight differs",
    ),
    "other plans": (mlp, plan_of_each_rank, "rank 0 and rank 1 were given different plans"),
    "an error on one rank": (mlp, only_rank_1, r"the plan names '\*sideways'"),
}


def refused(what):
    """The error of a rank, when the model is as it was."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    make, plan, _ = REFUSED[what]
    layers = make()
    before = [(name, type(one)) for name, one in nn.ModuleList(layers).named_modules()]
    parameters = list(nn.ModuleList(layers).parameters())
    with pytest.raises((TypeError, ValueError)) as error:
        parallelize(layers, plan(), group, sequence=True)
    assert before == [(name, type(one)) for name, one in nn.ModuleList(layers).named_modules()]
    assert not any(
        hasattr(one, "sequence") and what != "again" for one in nn.ModuleList(layers).modules()
    )
    for one, other in zip(nn.ModuleList(layers).parameters(), parameters, strict=True):
        assert one is other
    return str(error.value)


@pytest.mark.parametrize("what", REFUSED)
def test_parallelize_refuses(five, what):
    for message in five.call(refused, what)[:2]:
        assert re.match(REFUSED[what][2], message), message


def refused_by_layers():
    """Messages, by what is wrong, of what is refused when a layer is made or used."""
    group = first_ranks(2)
    if dist.get_rank() >= 2:
        return None
    torch.manual_seed(0)
    plain, masked = gpt2(), (torch.ones(2, 9, dtype=torch.long),) * 2
    split, along, eager = gpt2(), gpt2(), gpt2(attention="eager")
    parallelize(split, gpt2_plan(), group)
    parallelize(along, gpt2_plan(), group, sequence=True)
    parallelize(eager, gpt2_plan(), group, sequence=True)
    short = full_state_dict(split)
    del short["1.block.ln_1.bias"]
    longer = {**full_state_dict(split), "0.wte.weight": torch.zeros(11, 16)}
    tokens, logits = torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, 5)
    tries = {
        "column": lambda: ColumnParallelLinear(nn.Linear(4, 3), group),
        "row": lambda: RowParallelLinear(nn.Linear(3, 4), group),
        "attention": lambda: ParallelAttention(nn.MultiheadAttention(4, 2), group),
        "max_norm": lambda: VocabularyParallelEmbedding(nn.Embedding(4, 2, max_norm=1.0), group),
        "sequence": lambda: along[0](masked),
        "eager": lambda: nn.Sequential(*eager)(tokens),
        "cache": lambda: split[1].block.attn(torch.zeros(1, 4, 16), past_key_values=()),
        "token": lambda: split[0](tokens + 10),
        "negative token": lambda: split[0](tokens - 1),
        "target": lambda: vocabulary_cross_entropy(logits, tokens + 10, group),
        "target shape": lambda: vocabulary_cross_entropy(logits, tokens[:, 1:], group),
        "name": lambda: load_full_state_dict(split, short),
        "shape": lambda: load_full_state_dict(split, longer),
    }
    told = {}
    for name, function in tries.items():
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            function()
        told[name] = str(error.value)
    for name, one in full_state_dict(split).items():  # nothing was loaded
        assert torch.equal(one, nn.ModuleList(plain).state_dict()[name])
    return told


def test_layers_refuse(five):
    first, second = five.call(refused_by_layers)[:2]
    assert first == second
    expected = {
        "column": "2 ranks do not divide 3 outputs",
        "row": "2 ranks do not divide 3 inputs",
        "attention": "GPT-2's attention is needed, not MultiheadAttention",
        "max_norm": "an embedding with max_norm=1.0 is not provided for",
        "sequence": r"2 ranks do not divide dimension -2 of \(2, 9, 16\)",
        "eager": "a mask of 2 for 4 tokens: with sequence parallelism, eager attention needs a",
        "cache": "attention split over ranks has no cache: pass use_cache=False",
        "token": "a token is not in the vocabulary of 10",
        "negative token": "a token is not in the vocabulary of 10",
        "target": "a target is not among 10 words",
        "target shape": r"logits \(1, 4, 5\) do not fit targets \(1, 3\)",
        "name": "1.block.ln_1.bias is in the model only",
        "shape": r"0.wte.weight has shape \(11, 16\) in the state, and \(10, 16\) in the model",
    }
    assert first.keys() == expected.keys()
    for name, message in first.items():
        assert re.match(expected[name], message), (name, message)


def other_data():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    tokens = torch.arange(6)
    agree(group, tokens=tokens, targets=tokens + 1)
    with pytest.raises(ValueError) as error:
        agree(group, tokens=tokens, targets=tokens + rank)
    return str(error.value)


def test_other_data_in_one_tensor_group_is_noticed(five):
    assert five.call(other_data)[:2] == ["rank 0 and rank 1 have different targets"] * 2
