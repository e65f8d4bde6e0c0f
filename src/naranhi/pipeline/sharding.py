"""The interface between a pipeline and stages sharded over replicas (`zero.ZeroStages`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import nn

from naranhi.distributed import raise_on_all
from naranhi.schedules import Schedule
from naranhi.schedules.schedule import SHARDING

if TYPE_CHECKING:
    import torch.distributed as dist

    from naranhi.pipeline.stage import Stage


class ShardedStages(Protocol):
    """A rank's stages, sharded over its replicas, which run the same actions in the same order."""

    def begin(self) -> None:
        """Raise RuntimeError if the stages are gathered, or have gradients not yet applied."""

    def unshard(self, stage: int) -> None:
        """Start to gather a stage's parameters."""

    def wait(self, stage: int) -> None:
        """Wait until a stage's parameters are gathered; called before each of its actions."""

    def reshard(self, stage: int) -> None:
        """Free a stage's parameters."""

    def reduce_grad(self, stage: int) -> None:
        """Start to reduce a stage's gradients, and release them."""

    def finish(self) -> None:
        """Wait for all reductions; the last call of a step."""

    def shapes(self, stage: int) -> AbstractContextManager[None]:
        """Return a context in which a stage's parameters have their shapes, without values."""

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float, across: Sequence[dist.ProcessGroup]
    ) -> float:
        """Scale the reduced gradients by their norm, over these groups as well; return the norm."""


Sharding = Callable[[dict[int, "Stage"], int, "dist.ProcessGroup"], ShardedStages]


def zero_stage(schedule: Schedule) -> int:
    """Return the stage of ZeRO whose actions a schedule has: 3, 2, or 0 for none."""
    kinds = {action.kind for row in schedule for action in row}
    return 3 if "UNSHARD" in kinds else 2 if kinds & {*SHARDING} else 0


def sharded_stages(
    sharding: Sharding | None,
    stages: dict[int, Stage],
    schedule: Schedule,
    replicas: dist.ProcessGroup | None,
    group: dist.ProcessGroup,
) -> ShardedStages | None:
    """Shard a rank's stages by `sharding`, or return None without it; raise errors on all ranks."""
    if sharding is None:
        return None
    level, wrong = zero_stage(schedule), (TypeError, ValueError)
    return raise_on_all(
        lambda: sharding(stages, level, replicas), group, errors=wrong, kind=ValueError
    )


def check_sharding(
    schedule: Schedule,
    parts: Sequence[Sequence[nn.Module]],
    sharding: Sharding | None,
    replicas: dist.ProcessGroup | None,
    trial: str,
) -> None:
    """Raise ValueError unless sharding, replicas and trial fit the schedule's ZeRO actions.

    Args:
        schedule: the schedule to run.
        parts: the layers of each stage.
        sharding: as `pipeline.Pipeline` takes it.
        replicas: the ranks with the same stages; None without replicas.
        trial: as `pipeline.Pipeline` takes it.
    """
    level = zero_stage(schedule)
    if not level and sharding is None:
        return
    if not level:
        raise ValueError(
            "sharding is given, but the schedule has no action that gathers or reduces a stage: "
            "add them by schedules.with_sharding, for stage 2 or 3 (stage 1 needs none, but an "
            "optimizer that shards its own state, as torch's ZeroRedundancyOptimizer does)"
        )
    if sharding is None or replicas is None:
        first = next(action for row in schedule for action in row if action.kind in SHARDING)
        what = "sharding" if sharding is None else "replicas"
        raise ValueError(
            f"{first} cannot be run: pass sharding, such as zero.ZeroStages, and replicas, the "
            f"ranks over which stages are sharded ({what} is None)"
        )
    if level == 3 and trial == "data":
        raise ValueError(
            'trial="data" needs whole parameters, and at stage 3 a rank has only shards: use '
            'trial="shapes"'
        )
    users = {}
    for stage, part in enumerate(parts):
        trained = [p for layer in part for p in layer.parameters() if p.requires_grad]
        if not trained:
            raise ValueError(f"stage {stage} has no parameter to train, so nothing to shard")
        for parameter in {p for layer in part for p in layer.parameters()}:
            other = users.setdefault(parameter, stage)
            if other != stage:
                raise ValueError(
                    f"stages {other} and {stage} share a tied parameter, and would shard it "
                    "differently: untie it, or put its layers into one stage"
                )
