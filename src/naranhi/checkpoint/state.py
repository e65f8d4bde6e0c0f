"""A rank's state as named boxes, read from a model and its optimizer."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from naranhi.checkpoint import rest
from naranhi.checkpoint.boxes import Boxes
from naranhi.checkpoint.layout import Layout, RankState
from naranhi.checkpoint.parts import (
    Model,
    OptimizerPart,
    Part,
    buffers_of,
    modules_with_extra_state,
    optimizer_parts,
    optimizers_of,
    parameters_of,
    require_own_parameters,
    zero_of,
)
from naranhi.checkpoint.storage import CheckpointError

# What torch's optimizers keep once per parameter, not per element. If the parameter is a scalar,
# the two kinds have the same shape, so only the name tells.
COUNTERS = {"step", "eta", "mu", "mu_product"}
OWN = {"params", "param_names"}  # of a parameter group: each rank's own


class State:
    """This rank's part of the state of a model and its optimizer, between two steps.

    Args:
        model: see `Checkpoints.save`.
        optimizer: its optimizer, or None.
        with_optimizers: whether to include the state of optimizers, also of those that the stages
            of a pipeline have.

    Attributes:
        tensors: {name: Boxes}: views of the model's and the optimizer's own memory.

    Raises:
        CheckpointError: the optimizer is not that of the model, or keeps for a parameter a tensor
            of another shape; the model has parts that are not saved (`require_own_parameters`);
            the extra state of a module is more than tensors and plain values.
    """

    def __init__(
        self, model: Model, optimizer: torch.optim.Optimizer | None, with_optimizers: bool = True
    ) -> None:
        if zero := zero_of(model):
            zero.require_between_steps(optimizer)
        require_own_parameters(model)
        self.model: Model = model
        self.parameters: list[Part] = parameters_of(model)
        self.buffers: list[Part] = buffers_of(model)
        self.with_extra: dict[str, nn.Module] = modules_with_extra_state(model)
        extra = {name: module.get_extra_state() for name, module in self.with_extra.items()}
        digests = rest.digests(extra)
        self.extra: dict[str, tuple[str, Any]] = {
            name: (digests[name], tree_map_only(torch.Tensor, _on_cpu, value))
            for name, value in extra.items()
        }
        self.optimizers: list[torch.optim.Optimizer] = []
        self.optimized: list[OptimizerPart] = []
        if with_optimizers:
            self.optimizers = optimizers_of(model, optimizer)
            _require_plain(self.optimizers)
            self.optimized = optimizer_parts(model, optimizer, self.parameters)
        self.tensors: dict[str, Boxes] = {
            f"{kind}.{part.name}": part.boxes(_flat(part.values))
            for kind, parts in (("parameters", self.parameters), ("buffers", self.buffers))
            for part in parts
        }
        self.scalars: dict[str, dict[str, Any]] = {}
        self._counts = {}  # one tensor per value, because all ranks send each other all of them
        for of in self.optimized:
            for key, value in of.optimizer.state.get(of.tensor, {}).items():
                self._add(of, key, value)

    def _add(self, of, key, value):
        if not isinstance(key, str) or "." in key:
            raise CheckpointError(
                f"{type(of.optimizer).__name__} keeps {key!r} for {of.parts[0][0].name}: only what "
                "has a name without a dot can be saved"
            )
        if torch.is_tensor(value) and (value.dim() or key not in COUNTERS):
            if value.shape != of.tensor.shape and value.dim():
                raise CheckpointError(
                    f"{type(of.optimizer).__name__} keeps {key} of shape {tuple(value.shape)} for "
                    f"{of.parts[0][0].name}, of shape {tuple(of.tensor.shape)}: only what it keeps "
                    "for each element, or as a single number, can be saved"
                )
            if value.shape == of.tensor.shape:
                memory = _flat(value)
                for part, start in of.parts:
                    run = memory[start : start + part.values.numel()]
                    self.tensors[f"optimizer.{key}.{part.name}"] = part.boxes(run)
                return
        if torch.is_tensor(value):
            value = self._counts.setdefault((value.dtype, repr(value.item())), _on_cpu(value))
        for part, _ in of.parts:
            # Only ranks with elements of a parameter report this; all do if the parameter is empty.
            if part.values.numel() or not prod(part.shape):
                self.scalars.setdefault(part.name, {})[key] = value

    def summary(self) -> RankState:
        """Return the summary that this rank sends to the others."""
        return RankState(
            {
                name: (boxes.shape, boxes.dtype, tuple(boxes.views))
                for name, boxes in self.tensors.items()
            },
            self.scalars,
            {part.name: of.group for of in self.optimized for part, _ in of.parts},
            [
                (type(optimizer).__name__, [_options(group) for group in optimizer.param_groups])
                for optimizer in self.optimizers
            ],
            self.extra,
        )

    def written_by(self, rank: int, layout: Layout) -> dict[str, Boxes]:
        """Return the boxes that this rank, number `rank`, writes."""
        own = defaultdict(dict)
        for name, boxes in self.tensors.items():
            for box, view in boxes.views.items():
                if layout.writes[name, box] == rank:
                    own[name][box] = view
        return {
            name: Boxes(self.tensors[name].shape, self.tensors[name].dtype, views)
            for name, views in own.items()
        }


def _require_plain(optimizers):
    """Raise CheckpointError unless ranks can send each other the options, and files have them."""
    for optimizer in optimizers:
        rest.serialized([_options(group) for group in optimizer.param_groups])
        if others := [key for key in optimizer.state if not torch.is_tensor(key)]:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state for {others[0]!r}: only what it keeps for "
                "parameters can be saved"
            )


def _flat(tensor):
    return tensor.detach().reshape(-1)


def _on_cpu(tensor):
    return tensor.detach().cpu()


def _options(group):
    """Return a group's options, with tensors such as a rate on the CPU: ranks' devices differ."""
    return {
        key: value.detach().cpu() if torch.is_tensor(value) else value
        for key, value in group.items()
        if key not in OWN
    }
