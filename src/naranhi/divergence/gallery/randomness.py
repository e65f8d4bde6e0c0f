"""Which ranks must draw the same random numbers, and which must not?"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from naranhi.distributed import Mesh
from naranhi.divergence.gallery import toys
from naranhi.divergence.gallery.bug import Bug, Case, Expected
from naranhi.tensor_parallel import fork_rng, mlp_plan, parallelize

DROPPED = 0.25


class DropoutBlock(nn.Module):
    """An MLP block with dropout inside the part that tensor parallelism splits, or after it.

    Args:
        block: the block of `models.mlp` whose linear layers to use.
        inside: the dropout between the two linear layers.
        outside: the dropout after them.
    """

    up: nn.Module
    down: nn.Module
    inside: Callable[[torch.Tensor], torch.Tensor]
    outside: Callable[[torch.Tensor], torch.Tensor]

    def __init__(
        self,
        block: nn.Module,
        inside: Callable[[torch.Tensor], torch.Tensor],
        outside: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self.up, self.down, self.inside, self.outside = block.up, block.down, inside, outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x + outside(down(inside(gelu(up(x)))))."""
        return x + self.outside(self.down(self.inside(F.gelu(self.up(x)))))


# --- the same seed on every tensor-parallel rank --------------------------------------------------


def one_seed(x: torch.Tensor) -> torch.Tensor:
    """Drop some of this rank's activations, by a mask that every rank of the group draws."""
    return F.dropout(x, DROPPED)


def forked_seed(x: torch.Tensor) -> torch.Tensor:
    """Drop some of this rank's activations, by a mask that no other rank draws."""
    with fork_rng(x):
        return F.dropout(x, DROPPED)


def inside_case(drop: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """Return the case of an MLP split over tensor ranks, with dropout on split activations."""
    mesh = Mesh(tensor=dist.get_world_size())
    layers: list[nn.Module] = [DropoutBlock(block, drop, nn.Identity()) for block in toys.mlp()]
    whole: list[nn.Module] = [DropoutBlock(block, one_seed, nn.Identity()) for block in toys.mlp()]
    parallelize(layers, mlp_plan(), mesh.tensor)
    return _case(mesh, whole, layers, lambda: torch.manual_seed(0))


SAME_SEED = Bug(
    name="same seed",
    symptom="none: losses depend a little on the number of ranks, as one expects of dropout",
    hint="are the neurons that rank 0 drops and those that rank 1 drops drawn apart?",
    wrong=one_seed,
    right=forked_seed,
    make=inside_case,
    expected=Expected("mask", "0", "tensor"),
    reports=(
        "https://github.com/InternLM/InternLM/pull/405",
        "https://github.com/PaddlePaddle/PaddleFleetX/pull/1005",
    ),
)


# --- masks that differ where they must agree ------------------------------------------------------


def seed_by_rank() -> None:
    """Seed each rank differently, as data parallelism requires."""
    torch.manual_seed(dist.get_rank())


def seed_alike() -> None:
    """Seed the ranks of a tensor group alike: they hold the same activations."""
    torch.manual_seed(0)


def outside_case(seed: Callable[[], object]) -> Case:
    """Return the case of an MLP split over tensor ranks, with dropout on whole activations."""
    mesh = Mesh(tensor=dist.get_world_size())
    layers, whole = (
        [DropoutBlock(block, nn.Identity(), nn.Dropout(DROPPED)) for block in toys.mlp()]
        for _ in range(2)
    )
    parallelize(layers, mlp_plan(), mesh.tensor)
    return _case(mesh, whole, layers, seed)


def _case(mesh, whole, layers, seed):
    seed()

    def run(layers, step):
        return toys.regression_alone(layers, step)

    return Case(whole, toys.regression_alone, layers, run, mesh, toys.sgd, toys.sgd)


DIFFERENT_MASKS = Bug(
    name="different masks",
    symptom="the loss that rank 0 prints is not rank 1's, although both have the whole batch",
    hint="what must be equal on all ranks of a tensor group outside of the split layers?",
    wrong=seed_by_rank,
    right=seed_alike,
    make=outside_case,
    expected=Expected("mask", "0.outside", "tensor"),
    reports=("https://github.com/NVIDIA/Megatron-LM/pull/206",),
)
