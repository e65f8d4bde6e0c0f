"""Sum the gradients of a step over the pipelines that share its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from naranhi.data_parallel import all_reduce_bucketed
from naranhi.expert_parallel import MoE, expert_parameters, sum_over_copies
from naranhi.tensor_parallel.sequence_gradients import sum_before_reduction
from naranhi.tensor_parallel.shards import ShardedModule

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

    from naranhi.pipeline.sharding import ShardedStages


def sum_gradients(
    stages: nn.Module,
    replicas: dist.ProcessGroup | None,
    sharded: ShardedStages | None,
    has_experts: bool,
) -> None:
    """Sum the gradients of a rank's stages over their replicas, and those of experts over copies.

    Args:
        stages: this rank's stages.
        replicas: the ranks that have the same stages; None without replicas.
        sharded: the shards, if the schedule has reduced the gradients already.
        has_experts: whether a stage has experts.
    """
    if sharded:
        sharded.finish()
    elif has_experts:
        sum_over_copies(stages, replicas)
    elif replicas:
        all_reduce_bucketed(stages, replicas)


def has_parts(stage: nn.Module) -> bool:
    """Return whether ranks may hold only a part of a gradient of this stage.

    Args:
        stage: a stage with weights of its own.
    """
    return any(
        isinstance(module, MoE)
        or "_sequence_group" in vars(module)
        or (isinstance(module, ShardedModule) and module.sequence)
        for module in stage.modules()
    )


def sum_before_update(stage: nn.Module) -> None:
    """Sum partial gradients over tensor ranks and experts' copies, before an update within a step.

    Args:
        stage: a stage with weights of its own.
    """
    if torch.is_grad_enabled():
        sum_before_reduction(stage)
        if expert_parameters(stage):
            sum_over_copies(stage, None)
