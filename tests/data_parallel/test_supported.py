"""What data parallelism and ZeRO refuse to train, before anything is sent and on all ranks."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from naranhi.data_parallel import DDP, all_reduce_bucketed, all_reduce_gradients
from naranhi.expert_parallel import MoE, sum_gradients
from naranhi.tensor_parallel import Column, ColumnParallelLinear, Row, parallelize
from naranhi.zero import Zero, ZeroStages


def overlapped(model, group):
    return DDP(model, group)


def zero_1(model, group):
    return Zero(model, 1, group=group)


def zero_3(model, group):
    return Zero(model, 3, group=group)


def zero_stages(model, group):
    return ZeroStages({0: model}, 2, group)


LISTENERS = {"DDP": overlapped, "Zero 1": zero_1, "Zero 3": zero_3}
OWNERS = {**LISTENERS, "ZeroStages 2": zero_stages}


def words(**options):
    return nn.Sequential(nn.Embedding(5, 3, **options), nn.Linear(3, 3))


def distributed():
    model = words()
    # Of all ranks: a smaller mesh would make groups here that the other ranks do not count.
    mesh = DeviceMesh("cpu", range(dist.get_world_size()))
    weight = DTensor.from_local(torch.ones(3, 3), mesh, [Replicate()])
    model[1].weight = nn.Parameter(weight)
    return model


def lazy():
    return nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3))


def on_meta():
    model = words()
    model[1].to("meta")
    return model


def other_gradients():
    model = words().bfloat16()
    model[1].bias.grad_dtype = torch.float32
    return model


def with_buffer(buffer):
    model = words()
    model[1].register_buffer("table", buffer, persistent=False)
    return model


MODELS = {
    "lazy buffer": lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False)),
    "no values": lambda: with_buffer(torch.ones(2, device="meta")),
    "sparse buffer": lambda: with_buffer(torch.eye(2).to_sparse()),
    "expanded": lambda: with_buffer(torch.ones(1).expand(2)),
    "sparse": lambda: words(sparse=True),
    "bag": lambda: nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True, mode="sum")),
    "norm": lambda: words(max_norm=1.0),
    "subclass": distributed,
    "lazy": lazy,
    "meta": on_meta,
    "grad_dtype": other_gradients,
}
REASONS = {
    "lazy buffer": "buffer 1.running_mean is not initialized: run a forward of the lazy module "
    "first",
    "no values": "buffer 1.table is on the meta device and has no values: compute it first",
    "sparse buffer": "buffer 1.table is torch.sparse_coo, which is not sent: use to_dense()",
    "expanded": "buffer 1.table has several elements in one place of memory: clone() it",
    "sparse": "embedding 0 has sparse gradients, which are not summed over the ranks: make it with "
    "sparse=False",
    "bag": "embedding 0 has sparse gradients, which are not summed over the ranks: make it with "
    "sparse=False",
    "norm": "embedding 0 has max_norm=1.0, so its forward changes the rows that it reads, and the "
    "ranks' weights would diverge: make it without max_norm",
    "subclass": "parameter 1.weight is a DTensor, not a plain parameter",
    "lazy": "parameter 1.weight is not initialized: run a forward of the lazy module first",
    "meta": "parameter 1.weight is on the meta device and has no values: materialize it first",
    "grad_dtype": "parameter 1.bias of torch.bfloat16 accumulates its gradient in torch.float32: "
    "leave grad_dtype as it is",
}


def refusals(listener):
    """What each model is refused with; then one that is refused on the last rank only."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None

    def told(model):
        try:
            LISTENERS[listener](model, group)
        except TypeError as error:
            return str(error)
        return None

    found = {kind: told(make()) for kind, make in MODELS.items()}
    return found, told(words(sparse=rank == 1)), told(words())


@pytest.mark.parametrize("listener", LISTENERS)
def test_models_that_cannot_be_trained_are_refused_by_name(five, listener):
    for found, on_one, plain in five.call(refusals, listener)[:2]:
        assert found == REASONS
        assert on_one == "on rank 1 " + REASONS["sparse"]
        assert plain is None


def sharded(listener):
    """What is said of a model whose second layer two ranks share: by these two, and by copies."""
    pairs = [dist.new_group(one) for one in ([0, 1], [2, 3], [0, 2], [1, 3])]
    rank = dist.get_rank()
    if rank >= 4:
        return None
    shards, copies = pairs[rank // 2], pairs[2 + rank % 2]
    model = nn.Sequential(nn.Linear(4, 4), ColumnParallelLinear(nn.Linear(4, 4), shards))
    said = None
    try:
        LISTENERS[listener](model, shards)
    except TypeError as error:
        said = str(error)
    LISTENERS[listener](model, copies)
    return said


@pytest.mark.parametrize("listener", LISTENERS)
def test_ranks_with_other_shards_are_no_replicas(five, listener):
    for rank, said in enumerate(five.call(sharded, listener)[:4]):
        assert said == (
            f"ColumnParallelLinear 1 has different shards on rank {1 + rank // 2 * 2}: pass a "
            "group of ranks that hold the same shards, such as Mesh.replicas"
        )


def twice(first, second):
    """A model that is in a listener already; and when that is closed, or its model frozen."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    listener, found = OWNERS[first](model, group), []
    for part in model, model[1]:
        try:
            LISTENERS[second](part, group)
        except TypeError as error:
            found.append(str(error))
    model(torch.ones(1, 3))  # and the first is not disturbed
    listener.close()
    LISTENERS[second](model, group)
    return found


@pytest.mark.parametrize("first", OWNERS)
@pytest.mark.parametrize("second", LISTENERS)
def test_a_model_is_listened_to_by_one_only(five, first, second):
    for found in five.call(twice, first, second)[:2]:
        assert found == [
            f"parameter {name} belongs to another {first.split()[0]}, which sums its gradient as "
            "well: call close() on that first"
            for name in ("0.weight", "weight")
        ]


class Functional(nn.Module):
    """A sparse gradient that cannot be seen before it comes."""

    def __init__(self, sparse):
        super().__init__()
        self.weight, self.sparse = nn.Parameter(torch.ones(5, 3)), sparse

    def forward(self, words):
        return nn.functional.embedding(words, self.weight, sparse=self.sparse)


def sparse_gradients():
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    found = []
    for way in all_reduce_gradients, all_reduce_bucketed:
        for model in words(sparse=rank == 1), Functional(sparse=True):
            model(torch.tensor([rank])).sum().backward()
            try:
                way(model, group)
            except TypeError as error:
                found.append(str(error))
    for listener in LISTENERS.values():
        model = Functional(sparse=True)
        listener(model, group)
        try:
            model(torch.tensor([rank])).sum().backward()
        except TypeError as error:
            found.append(str(error))
    return found


def test_sparse_gradients_are_refused_by_name(five):
    end = "which is not summed over the ranks: use dense gradients (sparse=False)"
    for found in five.call(sparse_gradients)[:2]:
        assert found == [
            *[
                f"parameter 0.weight has a sparse gradient on rank 1, {end}",
                f"parameter weight has a sparse gradient on rank 0, 1, {end}",
            ]
            * 2,
            *[f"parameter weight has a gradient of layout torch.sparse_coo, {end}"] * 3,
        ]


def create_graph(listener):
    """On a rank: what is said of a backward with a graph; that of one without is right after."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    way, x = LISTENERS[listener](model, group), torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError) as told:
        model(x).sum().backward(create_graph=True)
    way.zero_grad() if "Zero" in listener else model.zero_grad()
    if listener != "Zero 3":  # the derivative of a derivative, as both allow it
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    return str(told.value)


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_gradient_with_a_graph_is_refused(five, listener):
    freed = r"a backward with create_graph=True goes through parameters that stage 3 frees"
    kept = r"the gradient of parameter 2\.\w+ has a graph, from backward\(create_graph=True\)"
    for told in five.call(create_graph, listener)[:2]:
        assert re.match(freed if listener == "Zero 3" else kept, told)


def summed_again(listener):
    """What other functions that sum gradients say of a model that is in a listener."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = nn.Linear(3, 3)
    with contextlib.closing(LISTENERS[listener](model, group)):
        model(torch.ones(1, 3)).sum().backward()
        said = []
        for again in all_reduce_gradients, all_reduce_bucketed, sum_gradients:
            with pytest.raises(RuntimeError) as error:
                again(model, group)
            said.append(str(error.value))
    return said


@pytest.mark.parametrize("listener", LISTENERS)
def test_gradients_are_not_summed_twice(five, listener):
    """It would multiply them by the number of ranks, which AdamW hides."""
    words = f"parameter weight belongs to a {listener.partition(' ')[0]}, which sums its gradient"
    for said in five.call(summed_again, listener)[:2]:
        assert len(said) == 3 and all(one.startswith(words) for one in said)


def with_experts(listener):
    """What is said of experts that are divided over ranks which the group does not have."""
    both, alone = first_ranks(2), [dist.new_group([rank]) for rank in (0, 1)]
    rank = dist.get_rank()
    if rank >= 2:
        return None
    with pytest.raises(TypeError) as error:
        LISTENERS[listener](nn.Sequential(MoE(4, 4, 2, 1, both)), alone[rank])
    return str(error.value)


@pytest.mark.parametrize("listener", LISTENERS)
def test_ranks_with_other_tokens_are_not_left_out(five, listener):
    for rank, said in enumerate(five.call(with_experts, listener)[:2]):
        if listener == "DDP":
            assert said.startswith(f"MoE 0 has experts on rank {1 - rank} too, outside the group: ")
            assert said.endswith("use expert_parallel.sum_gradients instead")
        else:
            assert "over 2 ranks (copies of each: 1), which does not fit a group of 1 ranks" in said


def with_copies(ranks):
    """What DDP says of whole experts with copies on ranks that its group does not have."""
    both, alone = first_ranks(2), [dist.new_group([rank]) for rank in (0, 1)]
    rank = dist.get_rank()
    if rank >= 2:
        return None
    model = nn.Sequential(MoE(4, 4, 2, 1, alone[rank], replicas=both))
    try:
        DDP(model, alone[rank] if ranks == 1 else both).close()
    except TypeError as error:
        return str(error)
    return "made"


def test_copies_of_experts_elsewhere_are_not_left_out(five):
    """As on a mesh with a tensor axis, along which whole experts have copies too."""
    assert five.call(with_copies, 2)[:2] == ["made"] * 2
    for rank, said in enumerate(five.call(with_copies, 1)[:2]):
        assert said.startswith(f"MoE 0 has copies of its experts on rank {1 - rank}, outside the")


def called():
    """What is said of a call of the wrapper, which torch's takes."""
    words = []
    for wrapper in DDP, lambda model: Zero(model, 2):
        with pytest.raises(TypeError) as error:
            wrapper(nn.Linear(2, 2))(torch.ones(1, 2))
        words.append(str(error.value))
    return words


def test_whoever_calls_the_wrapper_is_told_to_call_the_model(five):
    for words in five.call(called):
        for kind, told in zip(("DDP", "Zero"), words, strict=True):
            assert told.startswith(f"{kind} cannot be called: call the model that it was made with")


SUMS = all_reduce_gradients, all_reduce_bucketed


def mixed():
    """What the sums say of divided experts, of experts with copies elsewhere, and of split layers,
    over ranks that share them; and whether they sum over replicas."""
    group, rank = first_ranks(2), dist.get_rank()
    own = [dist.new_group([one]) for one in range(2)]
    if rank >= 2:
        return None
    split = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    split = parallelize(split, {"0": Column(), "2": Row()}, group)
    words = []
    for some, over in (
        (nn.Sequential(MoE(4, 4, 2, 1, group)), group),
        (nn.Sequential(MoE(4, 4, 2, 1, own[rank], replicas=group)), own[rank]),
        (split, group),
    ):
        for sums in SUMS:
            with pytest.raises(TypeError) as error:
                sums(some, over)
            words.append(str(error.value))
    for sums in SUMS:
        split(torch.ones(3, 2, 4)).sum().backward()
        sums(split, own[rank])
    return words


def test_sums_over_ranks_with_other_shards_are_refused(five):
    for words in five.call(mixed)[:2]:
        first, second, *copies = words[:4]
        assert first == second and "MoE 0 has different shards on rank" in first
        assert all("0 has copies of its experts on rank" in said for said in copies)
        assert all("has different shards on rank" in said for said in words[4:])
