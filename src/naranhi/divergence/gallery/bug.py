"""The parts of a bug of the gallery, and how to hunt it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from naranhi.distributed import Mesh
from naranhi.divergence.finder import find
from naranhi.divergence.reference import trace
from naranhi.divergence.report import Report


@dataclass
class Case:
    """A tiny training run, in one process and on the ranks of the world, that may have a bug.

    Attributes:
        whole: the unsplit model, a list of layers.
        alone: `alone(whole, step)` runs a step's forwards and backwards in one process, and returns
            the loss, a float.
        model: this rank's part of the model.
        run: `run(model, step)` does the same on the ranks, and returns the loss of the whole batch,
            the same on every rank.
        mesh: the ranks.
        update: `update(model)` makes an optimizer and steps, on the ranks.
        update_alone: the same in one process.
        scale: as `find` takes it.
    """

    whole: Any
    alone: Callable[[Any, int], float]
    model: Any
    run: Callable[[Any, int], float]
    mesh: Mesh | DeviceMesh
    update: Callable[[Any], object]
    update_alone: Callable[[Any], object]
    scale: float = 1.0

    def close(self) -> None:
        """Close the model and the mesh, if they have a `close`."""
        for thing in (self.model, self.mesh):
            if hasattr(thing, "close"):
                thing.close()


class Expected(NamedTuple):
    """The place that the finder must name.

    Args:
        phase: the phase of the step.
        layer: the layer or parameter.
        axis: the axis of the mesh, or None.
        ranks: "all", "last", "ends" (first and last), "not the first" or "not the last": the ranks
            that are wrong.
    """

    phase: str
    layer: str
    axis: str | None
    ranks: str = "all"

    def is_named_by(self, report: Report) -> bool:
        """Return whether a report names this phase, layer, axis and these ranks."""
        divergence, world = report.divergence, range(dist.get_world_size())
        ranks = {
            "all": world,
            "last": world[-1:],
            "ends": (world[0], world[-1]),
            "not the first": world[1:],
            "not the last": world[:-1],
        }[self.ranks]
        return divergence is not None and (
            (divergence.phase, divergence.layer, divergence.axis, divergence.ranks)
            == (self.phase, self.layer, self.axis, tuple(ranks))
        )


@dataclass(frozen=True)
class Bug:
    """A silent bug, with its fix and a training run for both.

    Attributes:
        name: a short name.
        symptom: the effect that a user sees, in a sentence.
        hint: where to look.
        wrong: the function with the bug.
        right: the corrected function, with the same arguments.
        make: `make(wrong)` or `make(right)` returns the `Case`, on every rank of the world, whose
            size is 2 or 4.
        expected: the place that the finder names.
        reports: the addresses of public reports of such a bug.
    """

    name: str
    symptom: str
    hint: str
    wrong: Callable[..., Any]
    right: Callable[..., Any]
    make: Callable[[Callable[..., Any]], Case]
    expected: Expected
    reports: tuple[str, ...]

    def hunt(self, fixed: bool = False) -> Report:
        """Return the finder's report on one step; every rank of the world calls this.

        Args:
            fixed: whether to run the right version.

        Raises:
            ValueError: the world has neither 2 nor 4 ranks.
        """
        case = self._case(fixed)
        try:
            alone, run = partial(case.alone, step=0), partial(case.run, step=0)
            reference = trace(case.whole, alone, update=case.update_alone)
            return find(
                case.model, run, reference, mesh=case.mesh, update=case.update, scale=case.scale
            )
        finally:
            case.close()

    def losses(self, steps: int, fixed: bool = False) -> list[float]:
        """Train for some steps, and return each step's loss; every rank of the world calls this.

        Args:
            steps: the number of steps.
            fixed: whether to run the right version.
        """
        case = self._case(fixed)
        try:
            losses = []
            for step in range(steps):
                losses.append(case.run(case.model, step))
                case.update(case.model)
                _zero_grad(case.model)
            return losses
        finally:
            case.close()

    def _case(self, fixed):
        if dist.get_world_size() not in (2, 4):
            raise ValueError(
                f"the gallery's bugs are for 2 or 4 ranks, and this world has "
                f"{dist.get_world_size()}"
            )
        return self.make(self.right if fixed else self.wrong)


def _zero_grad(model):
    if hasattr(model, "zero_grad"):
        model.zero_grad()
        return
    whole = model if hasattr(model, "parameters") else torch.nn.ModuleList(model)
    for param in whole.parameters():
        param.grad = None
