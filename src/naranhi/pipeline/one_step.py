"""A pipeline for a single step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from naranhi.pipeline.pipeline import Pipeline
from naranhi.schedules import Schedule

if TYPE_CHECKING:
    from naranhi.measure import Recorder


def run(
    schedule: Schedule,
    layers: Iterable[nn.Module],
    loss_fn: Callable[..., torch.Tensor],
    inputs: torch.Tensor | tuple[torch.Tensor, ...],
    targets: torch.Tensor | tuple[torch.Tensor, ...] | None,
    count: float | list[float] | tuple[float, ...],
    *,
    balance: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    recorder: Recorder | None = None,
) -> torch.Tensor | None:
    """Make a `Pipeline` for one step, and return what its `step` returns.

    Every rank calls this. The arguments are those of `Pipeline` and of `Pipeline.step`.
    """
    with Pipeline(layers, schedule, loss_fn, balance=balance, group=group) as pipeline:
        return pipeline.step(inputs, targets, count, recorder)
