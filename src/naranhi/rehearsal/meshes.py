"""Every mesh of a number of ranks, and the groups of a rank on one of them."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist

from naranhi.planning import Plan


class Groups(NamedTuple):
    """The process groups of a rank, in the order in which `planning.Plan` numbers the ranks.

    Attributes:
        tensor: Ranks that share layers.
        context: Ranks that share sequences.
        replicas: Ranks that have the same weights, so sum their gradients: dp x cp.
        pipeline: Ranks that have the stages of one pipeline.
        replica: Which share of the batch this rank has.
        part: Which part of each sequence this rank has.
    """

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    replicas: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    replica: int = 0
    part: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Groups:
        """Make the groups of a plan. Call it on every rank of the world.

        Raises:
            ValueError: If the plan is for another number of ranks.
        """
        if plan.ranks != dist.get_world_size():
            raise ValueError(
                f"the plan is for {plan.ranks} ranks, the world has {dist.get_world_size()}"
            )
        ranks = torch.arange(plan.ranks).view(plan.pp, plan.dp, plan.cp, plan.tp)
        _, replica, part, _ = (ranks == dist.get_rank()).nonzero()[0].tolist()
        return cls(
            _mine(ranks.reshape(-1, plan.tp)),
            _mine(ranks.transpose(2, 3).reshape(-1, plan.cp)),
            _mine(ranks.permute(0, 3, 1, 2).reshape(-1, plan.replicas)),
            _mine(ranks.reshape(plan.pp, -1).T),
            replica,
            part,
        )

    def close(self) -> None:
        """Destroy the groups; call this when every rank is done with them."""
        for group in self[:4]:
            dist.destroy_process_group(group)


def _mine(rows):
    """Make a group of each row, on all ranks in one order, and return this rank's."""
    groups = {tuple(row): dist.new_group(row, group_desc="unchecked") for row in rows.tolist()}
    return next(group for row, group in groups.items() if dist.get_rank() in row)


def meshes(ranks: int, layers: int) -> list[Plan]:
    """Return the plan of every mesh of `ranks` ranks, with at most as many stages as layers.

    Args:
        ranks: The number of ranks.
        layers: The layers of the model.
    """
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [
        Plan(dp, tp, pp, cp, sequence_parallel=False, precision="fp32")
        for pp, dp, cp, tp in product(sizes, repeat=4)
        if pp * dp * cp * tp == ranks and pp <= layers
    ]
