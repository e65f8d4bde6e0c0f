"""Who sees which part of the data, and in what order?"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from naranhi import models
from naranhi.distributed import Mesh, device_of
from naranhi.divergence.gallery import toys
from naranhi.divergence.gallery.bug import Bug, Case, Expected
from naranhi.tensor_parallel import ColumnParallelLinear, gather_from_group

# --- the same batch on every rank -----------------------------------------------------------------


def first_rows(order: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return this rank's share of the shuffled rows: as many as it needs."""
    return order[: len(order) // ranks]


def every_nth_row(order: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return this rank's share of the shuffled rows: those that no other rank takes."""
    return order[rank::ranks]


def sampler_case(choose: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Case:
    """Return the case of an MLP on shares that `choose` takes from an order all ranks know."""
    mesh = Mesh(data=dist.get_world_size())

    def run(layers, step):
        inputs, targets = toys.regression(step)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(step))
        rows = choose(order, mesh.place.data, mesh.sizes.data)
        loss = toys.squared_error(toys.forward(layers, inputs[rows]), targets[rows])
        (loss := loss / targets.numel()).backward()
        for param in nn.ModuleList(layers).parameters():
            dist.all_reduce(param.grad, group=mesh.data)
        return toys.total(loss)

    return Case(toys.mlp(), toys.regression_alone, toys.mlp(), run, mesh, toys.sgd, toys.sgd)


SAME_BATCH = Bug(
    name="same batch",
    symptom="every rank reports the same loss, to the last digit, in every step",
    hint="write down which rows each rank has seen after one step",
    wrong=first_rows,
    right=every_nth_row,
    make=sampler_case,
    expected=Expected("data", "0", "data"),
    reports=("https://github.com/pytorch/pytorch/issues/31771",),
)


# --- the columns of a fused layer -----------------------------------------------------------------


class FusedBlock(nn.Module):
    """x + q * sigmoid(k) + v, of a fused layer that computes q, k and v side by side."""

    qkv: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(toys.HIDDEN, 3 * toys.HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + q * sigmoid(k) + v."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + q * k.sigmoid() + v


class GatheredColumns(ColumnParallelLinear):
    """A fused layer: each rank computes a part of q, of k and of v, then gathers all parts.

    Args:
        linear: the unsplit layer.
        gather: makes the whole output from this rank's part, by communication.
    """

    gather: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, linear: nn.Module, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(linear, parts=3)
        self.gather = gather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return q, k and v, side by side."""
        return self.gather(super().forward(x))


def concatenate(part: torch.Tensor) -> torch.Tensor:
    """Concatenate the ranks' parts: q0 k0 v0 q1 k1 v1."""
    return gather_from_group(part)


def concatenate_each(part: torch.Tensor) -> torch.Tensor:
    """Concatenate the ranks' parts of each third: q0 q1 k0 k1 v0 v1."""
    by_rank = gather_from_group(part).unflatten(-1, (dist.get_world_size(), 3, -1))
    return by_rank.transpose(-3, -2).flatten(-3)


def fused_case(gather: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """Return the case of two fused layers, split over tensor ranks and gathered again."""
    mesh = Mesh(tensor=dist.get_world_size())
    torch.manual_seed(0)
    whole: list[nn.Module] = [FusedBlock(), FusedBlock()]
    torch.manual_seed(0)
    layers: list[nn.Module] = [FusedBlock(), FusedBlock()]
    for layer in layers:
        layer.qkv = GatheredColumns(layer.qkv, gather)
    alone = toys.regression_alone
    return Case(whole, alone, layers, alone, mesh, toys.sgd, toys.sgd)


FUSED_COLUMNS = Bug(
    name="fused columns",
    symptom="weights that one process has trained begin with another loss on ranks; then it falls",
    hint="each rank's columns are a part of q, a part of k and a part of v",
    wrong=concatenate,
    right=concatenate_each,
    make=fused_case,
    expected=Expected("forward", "0.qkv", "tensor"),
    reports=(
        "https://github.com/ndif-team/nnsight/pull/719",
        "https://github.com/awslabs/slapo/pull/46",
        "https://github.com/deepspeedai/DeepSpeed/pull/3844",
    ),
)


# --- positions that begin from zero on every rank -------------------------------------------------


class Positions(nn.Module):
    """Tokens and their positions as vectors: (rows, length) to (rows, length, hidden).

    Args:
        number: `number(length)` returns the positions of this rank's tokens.
    """

    wte: nn.Embedding
    wpe: nn.Embedding
    number: Callable[[int], torch.Tensor]

    def __init__(self, number: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.wte = nn.Embedding(toys.WORDS, toys.HIDDEN)
        self.wpe = nn.Embedding(toys.LENGTH, toys.HIDDEN)
        self.number = number

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tokens' and the positions' vectors."""
        return self.wte(tokens) + self.wpe(self.number(tokens.shape[1]))


def from_zero(length: int) -> torch.Tensor:
    """Return the positions of `length` tokens."""
    return torch.arange(length, device=device_of())


def from_own_start(length: int) -> torch.Tensor:
    """Return the positions of this rank's `length` tokens in the whole sequence."""
    return torch.arange(length, device=device_of()) + dist.get_rank() * length


def positions_case(number: Callable[[int], torch.Tensor]) -> Case:
    """Return the case of a model without attention, of whose sequences each rank has a part."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device_of().type, (ranks,), mesh_dim_names=("context",))

    def layers(number) -> list[nn.Module]:
        torch.manual_seed(0)
        middle = [Positions(number), *models.mlp(1, toys.HIDDEN)]
        return toys.on_device([*middle, nn.Linear(toys.HIDDEN, toys.WORDS)])

    def run(layers, step):
        tokens, targets, count = toys.text(step)
        part, wanted = (x.chunk(ranks, 1)[dist.get_rank()] for x in (tokens, targets))
        loss = models.loss(toys.forward(layers, part), wanted) / count
        loss.backward()
        for param in nn.ModuleList(layers).parameters():
            dist.all_reduce(param.grad)
        return toys.total(loss)

    return Case(layers(from_zero), toys.text_alone, layers(number), run, mesh, toys.sgd, toys.sgd)


POSITIONS_FROM_ZERO = Bug(
    name="positions from zero",
    symptom="the loss falls along another curve than one process's, from the first step on",
    hint="which position has the first token of the second rank?",
    wrong=from_zero,
    right=from_own_start,
    make=positions_case,
    expected=Expected("forward", "0.wpe", "context", "not the first"),
    reports=(
        "https://github.com/vllm-project/speculators/pull/871",
        "https://github.com/NVIDIA/Megatron-LM/issues/560",
    ),
)
