"""A model with experts as a whole: the norm of its gradients, its state, its checkpoints."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from expert_gpt2 import backward, gpt2, rows_of
from gloo_ranks import first_ranks

from naranhi import models
from naranhi.checkpoint import Checkpoints
from naranhi.data_parallel import DDP
from naranhi.expert_parallel import ExpertsMLP, MoE, add_experts
from naranhi.tensor_parallel import clip_grad_norm_, full_state_dict


def apart(some, others):
    """The largest difference of tensors of the same names and shapes."""
    assert some.keys() == others.keys()
    return max((some[name] - others[name]).abs().max().item() for name in some)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def clipped(copies):
    """On four ranks: (how far the norm is from one process's, the norm, how far gradients are)."""
    everyone, alone, rank = first_ranks(4), first_ranks(1), dist.get_rank()
    pairs = [dist.new_group(one) for one in ([0, 1], [2, 3], [0, 2], [1, 3])]
    if rank >= 4:
        return None
    axes = (pairs[rank // 2], None, pairs[2 + rank % 2]) if copies else (everyone,)
    model = gpt2(*axes)
    backward(model, rows_of(rank, 4), everyone)
    norm = clip_grad_norm_(model, 0.5)
    for parameter in model.parameters():  # the whole gradient, in the place of the weight
        parameter.data = parameter.grad
    whole = full_state_dict(model)
    if rank:
        return None
    reference = gpt2(alone)
    backward(reference, slice(None))
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5).item()
    found = {name: whole[name] for name in gradients(reference)}
    return abs(norm - expected), expected, apart(found, gradients(reference))


@pytest.mark.parametrize("copies", [False, True])
def test_the_norm_is_that_of_the_whole_model(five, copies):
    difference, norm, gradient = five.call(clipped, copies)[0]
    assert norm > 1.0, "clipped to half and less"
    assert difference <= 1e-6 * norm
    assert gradient <= 1e-6


def gathered():
    group, rank = first_ranks(4), dist.get_rank()
    alone = first_ranks(1)
    if rank >= 4:
        return None
    whole = full_state_dict(gpt2(group))
    return apart(whole, gpt2(alone).state_dict()) if rank == 0 else len(whole)


def test_the_full_state_has_every_expert(five):
    assert five.call(gathered)[0] == 0.0


def trained(folder, first, last):
    """Losses of steps on as many ranks as there are, before a checkpoint or after it."""
    group = dist.group.WORLD
    rows = rows_of(dist.get_rank(), dist.get_world_size())
    model = gpt2(group)
    # With a smaller eps, Adam makes whole steps of gradients that are nothing but rounding.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    with Checkpoints(folder, keep=9) as checkpoints:
        if first:
            assert checkpoints.load(model, optimizer, first).step == first
        for _ in range(first, last):
            optimizer.zero_grad()
            losses.append(backward(model, rows, group))
            optimizer.step()
        if not first:
            checkpoints.save(last, model, optimizer)
    return torch.tensor(losses)


def test_any_number_of_ranks_goes_on_where_four_were(eight, tmp_path):
    """With the experts and their moments, redistributed: the losses of one that did not stop."""
    expected = eight(1, trained, str(tmp_path / "alone"), 0, 4)[0]
    assert expected[3, 0] < expected[0, 0] - 0.3
    before = eight(4, trained, str(tmp_path / "four"), 0, 2)[0]
    torch.testing.assert_close(before, expected[:2], rtol=0, atol=1e-5)
    for ranks in 4, 2, 1:
        after = eight(ranks, trained, str(tmp_path / "four"), 2, 4)[0]
        torch.testing.assert_close(after, expected[2:], rtol=0, atol=1e-5, msg=str(ranks))


def wrapped():
    """What is said where the group has other experts; then where it has copies of the same only."""
    everyone, rank = first_ranks(4), dist.get_rank()
    pairs = [dist.new_group(one) for one in ([0, 1], [2, 3], [0, 2], [1, 3])]
    if rank >= 4:
        return None
    said = []
    for group, listens in (everyone, everyone), (pairs[rank // 2], pairs[2 + rank % 2]):
        with pytest.raises(TypeError) as error:
            DDP(gpt2(group), listens)
        said.append(str(error.value))
    return said


def test_ranks_with_other_experts_are_no_replicas(five):
    """Wrapped all the same, the experts of all ranks would become the first rank's."""
    for rank, (others, copies) in enumerate(five.call(wrapped)[:4]):
        assert others == (
            "MoE 2.block.mlp.moe has different shards on rank 1, 2, 3: pass a group of ranks that "
            "hold the same shards, such as Mesh.replicas"
        ), rank
        assert f"has experts on rank {1 - rank % 2} too, outside the group" in copies


def copied(explicit):
    """On a rank: whether a copy made after a forward computes the same, from no forward."""
    group = dist.new_group(range(5)) if explicit else None
    torch.manual_seed(0)
    mlp = ExpertsMLP(MoE(4, 8, 5, 2, group), tensor=group)
    x = torch.randn(2, 5, 4)
    expected = mlp(x)
    copy = deepcopy(mlp)
    assert copy.auxiliary is None and mlp.auxiliary is not None
    assert mlp.moe.up is not copy.moe.up and copy.moe.group is copy.tensor is group
    return torch.equal(copy(x), expected)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_layer_is_copied_after_a_forward(five, explicit):
    assert five.call(copied, explicit) == [True] * 5


def on_a_tensor_group(copied):
    """On a rank: what is said of experts on a tensor group, whose copies are known or not."""
    pair, rank = first_ranks(2), dist.get_rank()
    own = [dist.new_group([one]) for one in range(2)]
    if rank >= 2:
        return None
    layers = models.gpt2(models.gpt2_config(16, 8, 8, 2, 2), dropout=0.0)
    options = {"replicas": pair} if copied else {}
    try:
        add_experts(layers, 2, 1, own[rank], tensor=pair, **options)
    except ValueError as error:
        return str(error)
    return "made"


def test_a_layer_knows_its_copies_on_the_tensor_group(five):
    assert five.call(on_a_tensor_group, True)[:2] == ["made"] * 2
    for said in five.call(on_a_tensor_group, False)[:2]:
        assert said.startswith("the ranks of the tensor group have copies of the experts and")
