"""Pipeline parallelism: a rank runs its row of a schedule, action by action."""

from naranhi.pipeline.groups import join_group_creation
from naranhi.pipeline.one_step import run
from naranhi.pipeline.overlap import in_threads
from naranhi.pipeline.partition import cut
from naranhi.pipeline.pipeline import Pipeline
from naranhi.pipeline.profiling import profile
from naranhi.schedules.balance import (
    LayerProfile,
    balanced,
    by_size,
    slowest,
    stage_times,
    uniform,
)

__all__ = [
    "LayerProfile",
    "Pipeline",
    "balanced",
    "by_size",
    "cut",
    "in_threads",
    "join_group_creation",
    "profile",
    "run",
    "slowest",
    "stage_times",
    "uniform",
]
