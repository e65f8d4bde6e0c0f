"""Which gradients `sum_gradients` sums where ranks lack some, or freeze different parameters."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn

from naranhi.expert_parallel import MoE, sum_gradients


class Model(nn.Module):
    def __init__(self, group, replicas=None):
        super().__init__()
        self.moe = MoE(4, 6, 4, 1, group, replicas=replicas)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))


def with_unused():
    """By layer, whether it has a gradient, and whether weight decay has moved it."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    model = Model(group)
    before = [layer.weight.detach().clone() for layer in model.layers]
    output, _ = model.moe(model.layers[0](torch.randn(5, 4)))
    if rank == 1:
        output = model.layers[1](output)
    output.sum().backward()
    sum_gradients(model, group)
    torch.optim.AdamW(model.parameters(), weight_decay=0.5).step()
    return [
        (layer.weight.grad is not None, not torch.equal(layer.weight, old))
        for layer, old in zip(model.layers, before, strict=True)
    ]


def test_what_no_rank_used_has_no_gradient(five):
    used, unused = (True, True), (False, False)
    assert five.call(with_unused)[:2] == [[used, used, unused]] * 2  # the second on rank 1 only


def frozen(what, rank):
    """What a rank freezes."""
    return {
        "another layer": f"layers.{rank}.weight",
        "a layer on one rank": "layers.0.weight" if rank == 1 else "",
        "experts on one copy": "moe.up" if rank == 3 else "",
        "the same": "layers.2.weight",
    }[what]


def with_frozen(what):
    """The error, and which gradients have changed all the same."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3])]
    if rank >= 4:
        return None
    torch.manual_seed(0)
    model = Model(groups[rank // 2], groups[2 + rank % 2])
    for name, param in model.named_parameters():
        param.requires_grad_(name != frozen(what, rank))
        param.grad = torch.full_like(param, rank + 1.0) if param.requires_grad else None
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    message = ""
    try:
        sum_gradients(model, groups[4])
    except RuntimeError as error:
        message = str(error)
    after = dict(model.named_parameters())
    return message, [name for name, grad in before.items() if not grad.equal(after[name].grad)]


@pytest.mark.parametrize(
    "what, words",
    [
        (
            "another layer",
            "layers.0.weight is trained on rank 1, 2, 3, and frozen on rank 0",
        ),
        ("a layer on one rank", "layers.0.weight is trained on rank 0, 2, 3, and frozen on rank 1"),
    ],
)
def test_other_parameters_frozen_on_other_ranks_are_refused(five, what, words):
    for message, changed in five.call(with_frozen, what)[:4]:
        assert message.startswith(f"parameter {words}") and not changed


def test_copies_of_experts_frozen_on_some_ranks_are_refused_on_all(five):
    found = five.call(with_frozen, "experts on one copy")[:4]
    for rank, (message, changed) in enumerate(found):
        there = "moe.up is trained on rank 1, and frozen on rank 3" in message
        elsewhere = "rank 1, 3: copies of experts are trained on some ranks" in message
        assert (there if rank % 2 else elsewhere) and not changed


def test_the_same_parameters_frozen_on_every_rank(five):
    for message, changed in five.call(with_frozen, "the same")[:4]:
        assert not message
        assert changed == ["moe.up", "moe.down", "moe.router.weight"] + [
            f"layers.{layer}.weight" for layer in (0, 1)
        ]
