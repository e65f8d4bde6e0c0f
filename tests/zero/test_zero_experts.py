"""Experts under ZeRO, sharded over their copies, all else over all ranks; against one process."""

import pytest
import torch
import torch.distributed as dist
from expert_gpt2 import EXPERTS, LENGTH, ROWS, WORDS
from gloo_ranks import first_ranks
from torch import nn

from naranhi import checkpoint, models
from naranhi.expert_parallel import MoE, add_experts
from naranhi.tensor_parallel import (
    full_state_dict,
    gpt2_plan,
    parallelize,
    vocabulary_cross_entropy,
)
from naranhi.tensor_parallel.sequence_gradients import mark_sequence_module
from naranhi.zero import Zero

STEPS, RATE, CLIP = 4, 0.3, 0.05  # a norm below those met here
PAIRS = [0, 1], [2, 3]
ACROSS = [0, 2], [1, 3]
ALL = ([0, 1, 2, 3],)
OWN = [0], [1], [2], [3]
MESHES = {  # ranks that hold: dense shards, the same dense shard, other experts, copies, a layer
    "divided over all": (ALL, None, ALL, None, None),
    "pairs and copies": (ALL, None, PAIRS, ACROSS, None),
    "all experts everywhere": (ALL, None, OWN, ALL, None),
    "hybrid, experts near": (PAIRS, ACROSS, PAIRS, ACROSS, None),
    "hybrid, copies near": (PAIRS, ACROSS, ACROSS, PAIRS, None),
    "tensor and expert": (ACROSS, None, ACROSS, PAIRS, PAIRS),
    "tensor and data": (ACROSS, None, OWN, ALL, PAIRS),
}


def groups(name):
    """On a rank: its group on each axis of a mesh of the first four ranks, or None on the fifth."""
    made = {}
    for lists in MESHES[name]:
        for ranks in lists or ():
            key = tuple(ranks)
            made[key] = made[key] if key in made else dist.new_group(ranks)
    first_ranks(4)
    rank = dist.get_rank()
    if rank >= 4:
        return None
    return [
        lists and next(made[tuple(ranks)] for ranks in lists if rank in ranks)
        for lists in MESHES[name]
    ]


def make(experts, copies=None, tensor=None, sequence=False, coefficient=0.01):
    torch.manual_seed(0)
    config = models.gpt2_config(WORDS, LENGTH, hidden=16, heads=2, blocks=4)
    layers = add_experts(
        models.gpt2(config, tied=False, dropout=0.0),
        EXPERTS,
        2,
        experts,
        replicas=copies,
        coefficient=coefficient,
        tensor=tensor,
        sequence=sequence,
    )
    if tensor:
        parallelize(layers, gpt2_plan(), tensor, sequence=sequence)
    return nn.Sequential(*layers)


def loss_of(model, rows, tensor=None):
    """The loss of these rows, as a part of that of all of them."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(WORDS, (sum(ROWS), 1), generator=generator)
    tokens = (start + 3 * torch.arange(LENGTH + 1)) % WORDS
    inputs, targets = tokens[rows, :-1], tokens[rows, 1:]
    logits = model(inputs)
    parts = vocabulary_cross_entropy(logits, targets, tensor) if tensor else None
    return (models.loss(logits, targets) if parts is None else parts) / (sum(ROWS) * LENGTH)


def alone():
    """What one process trains, and the norm of each step."""
    own = [dist.new_group([rank]) for rank in range(5)][dist.get_rank()]
    model, norms = make(own), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, slice(None)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return full_state_dict(model), norms


def share(mesh):
    """The rows of a rank: of four, or of two where two ranks have the same."""
    rank, tensor = dist.get_rank(), MESHES[mesh][4]
    ranks, rank = (2, rank // 2) if tensor else (4, rank)
    shares = [*ROWS[: ranks - 1], sum(ROWS[ranks - 1 :])]
    return slice(sum(shares[:rank]), sum(shares[: rank + 1]))


def trained(name, stage, precision, sequence):
    """On a rank: how far parameters and norms are from one process's; how many elements of momentum
    it keeps; and how many the model has, without experts and of experts."""
    axes, (expected, norms) = groups(name), alone()
    if axes is None:
        return None
    near, far, experts, copies, tensor = axes
    model = make(experts, copies, tensor, sequence)
    zero = Zero(model, stage, precision=precision, group=near, replicas=far)
    optimizer, found = torch.optim.SGD(zero.param_groups, lr=RATE, momentum=0.9), []
    for _ in range(STEPS):
        loss_of(model, share(name), tensor).backward()
        found.append(zero.clip_grad_norm_(CLIP))
        zero.step(optimizer)
    held = zero.memory(optimizer)["optimizer"]
    with zero.gathered():
        whole = full_state_dict(model)
    apart = max((whole[name] - expected[name]).abs().max().item() for name in expected)
    norms = max(abs(a - b) / b for a, b in zip(found, norms, strict=True))
    sizes = {name: value.numel() for name, value in whole.items()}
    of_experts = sum(size for name, size in sizes.items() if name.endswith((".up", ".down")))
    return apart, norms, held / 4, (sum(sizes.values()) - of_experts, of_experts)


CASES = [(name, stage, False) for name in MESHES for stage in (1, 2, 3)]
CASES += [("tensor and expert", 3, True), ("tensor and data", 2, True)]


@pytest.mark.parametrize("name, stage, sequence", CASES)
def test_training_equals_one_process(five, name, stage, sequence):
    """Each momentum is kept once; in hybrid sharding once in each group, but of experts."""
    answers = five.call(trained, name, stage, "fp32", sequence)[:4]
    for apart, norms, _, _ in answers:
        assert apart <= 1e-5 and norms <= 1e-5
    dense, experts = answers[0][3]
    if "tensor" not in name:
        copies = 2 if "hybrid" in name else 1
        assert sum(kept for _, _, kept, _ in answers) == copies * dense + experts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_bf16_experts_have_masters_too(five, stage):
    for apart, norms, *_ in five.call(trained, "pairs and copies", stage, "bf16", False)[:4]:
        assert 1e-5 < apart < 3e-3 and norms < 0.03


def written(mesh, what, apart_on):
    """On a rank: what is said of a block that writes other values on some ranks, or which values
    are trained after it."""
    axes = groups(mesh)
    if axes is None:
        return None
    near, _, experts, copies, tensor = axes
    zero = Zero(model := make(experts, copies, tensor), 2, group=near)
    [moe, _] = [module for module in model.modules() if isinstance(module, MoE)]
    param = moe.up if what == "experts" else model[2].block.ln_1.weight
    try:
        with zero.gathered(write=True), torch.no_grad():
            param.fill_(7.0 if dist.get_rank() in apart_on else 2.0)
    except ValueError as error:
        return str(error)
    loss_of(model, share(mesh), tensor).backward()
    zero.step(torch.optim.SGD(zero.param_groups, lr=0.0))
    return param.unique().tolist()


def test_copies_are_written_alike_and_other_experts_are_not(five):
    mesh = "pairs and copies"
    assert five.call(written, mesh, "experts", [1, 3])[:4] == [[2.0], [7.0], [2.0], [7.0]]
    for said in five.call(written, mesh, "experts", [3])[:4]:
        assert said == "rank 1 and rank 3 have different parameter 2.block.mlp.moe.up"


@pytest.mark.parametrize(
    "what, name", [("dense", "block.ln_1.weight"), ("experts", "block.mlp.moe.up")]
)
def test_with_a_tensor_axis_too_all_ranks_hear_of_other_values(five, what, name):
    for said in five.call(written, "tensor and expert", what, [3])[:4]:
        assert said.endswith(f"rank 3 have different parameter 2.{name}")


def begun(stage):
    """On a rank: the values of its experts under Zero, where each rank has drawn others."""
    axes = groups("pairs and copies")
    if axes is None:
        return None
    near, _, experts, copies, _ = axes
    model = make(experts, copies)
    [moe, _] = [module for module in model.modules() if isinstance(module, MoE)]
    with torch.no_grad():
        moe.up.fill_(dist.get_rank())
    zero = Zero(model, stage, group=near)
    with zero.gathered():
        return moe.up.unique().tolist()


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_begin_as_those_of_the_first_copy(five, stage):
    assert five.call(begun, stage)[:4] == [[0.0], [1.0], [0.0], [1.0]]


def on_another_mesh(folder, before, after, stages):
    """On a rank: how far what was saved on a mesh and loaded on another is, two steps later, from
    what went on there. Both have experts elsewhere."""
    whole = []
    for number, (name, stage) in enumerate(zip((before, after), stages, strict=True)):
        axes = groups(name)
        if axes is None:
            continue
        near, far, experts, copies, tensor = axes
        model = make(experts, copies, tensor)
        zero = Zero(model, stage, group=near, replicas=far)
        optimizer = torch.optim.SGD(zero.param_groups, lr=RATE, momentum=0.9)
        checkpoints = checkpoint.Checkpoints(folder, group=first_ranks(4))
        if number:
            checkpoints.load(model=zero, optimizer=optimizer)
        for step in range(4 - 2 * number):
            if step == 2:
                checkpoints.save(step, model=zero, optimizer=optimizer)
            loss_of(model, share(name), tensor).backward()
            zero.step(optimizer)
        with zero.gathered():
            whole.append(full_state_dict(model))
    if not whole:
        return 0.0
    return max((whole[0][name] - value).abs().max().item() for name, value in whole[1].items())


@pytest.mark.parametrize(
    "before, after, stages",
    [
        ("pairs and copies", "divided over all", (3, 1)),
        ("divided over all", "tensor and expert", (2, 3)),
        ("tensor and data", "hybrid, copies near", (1, 2)),
    ],
)
def test_a_checkpoint_goes_on_where_experts_are_elsewhere(five, tmp_path, before, after, stages):
    folder = str(tmp_path / "run")
    assert max(five.call(on_another_mesh, folder, before, after, stages)) <= 1e-5


def marked_later(mesh):
    """On a rank: what is said of routers that a tensor group was given later, without copies."""
    axes = groups(mesh)
    if axes is None:
        return None
    group, _, experts, _, tensor = axes
    model = make(experts)
    for module in model.modules():
        if isinstance(module, MoE):
            mark_sequence_module(module.router, tensor)
    with pytest.raises(TypeError) as error:
        Zero(model, 2, group=group)
    return str(error.value)


@pytest.mark.parametrize("mesh", ["tensor and expert", "tensor and data"])
def test_copies_on_a_tensor_group_are_not_forgotten(five, mesh):
    for said in five.call(marked_later, mesh)[:4]:
        assert "does not fit a group of 2 ranks and tensor groups of 2: pass to the layer" in said


def told(case):
    """On a rank: what is said of experts that lie in other groups than Zero is given."""
    axes = groups("pairs and copies")
    if axes is None:
        return None
    group, _, experts, copies, _ = axes
    stage, coefficient = 2, 0.01
    if case == "copies that the layer does not know":
        copies = None
    elif case == "experts outside of the group":
        group = copies
    elif case == "both":  # as many ranks as the group has, but not its own
        group, copies = copies, None
    elif case == "copies outside of the group":
        group = experts
    elif case == "an auxiliary loss beside the output":
        stage, coefficient = 3, None
    with pytest.raises(TypeError) as error:
        Zero(make(experts, copies, coefficient=coefficient), stage, group=group)
    return str(error.value)


@pytest.mark.parametrize(
    "case, words",
    [
        (
            "copies that the layer does not know",
            "has experts that are divided over 2 ranks (copies of each: 1), which does not fit a "
            "group of 4 ranks: pass to the layer, as `replicas`, all ranks with copies",
        ),
        ("experts outside of the group", "(copies of each: 2), which does not fit a group of 2"),
        ("both", "over 2 ranks (copies of each: 1), which does not fit a group of 2 ranks"),
        (
            "copies outside of the group",
            "(copies of each: 2), which does not fit a group of 2 ranks",
        ),
        (
            "an auxiliary loss beside the output",
            "pass add_experts, or divide_experts, a coefficient",
        ),
    ],
)
def test_what_would_train_wrong_is_refused_on_every_rank(five, case, words):
    for said in five.call(told, case)[:4]:
        assert words in said
