"""A rank's state as named boxes: read from a model and its optimizer, and put back into them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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

# What torch's optimizers keep for a parameter as a whole, although it may have a parameter's shape:
# that of a scalar parameter.
COUNTERS = {"step", "eta", "mu", "mu_product"}


class State:
    """This rank's part of the state of a model and its optimizer, between two steps.

    Args:
        model: see `Checkpoints.save`.
        optimizer: its optimizer, or None.
        with_optimizers: whether the state of optimizers is part of it, also of those that stages of
            a pipeline have.

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
            self.optimized = optimizer_parts(model, optimizer, self.parameters)
        self.tensors: dict[str, Boxes] = {
            f"{kind}.{part.name}": part.boxes(_flat(part.values))
            for kind, parts in (("parameters", self.parameters), ("buffers", self.buffers))
            for part in parts
        }
        self.scalars: dict[str, dict[str, Any]] = {}
        self._counts = {}  # of equal tensors one, because all ranks send each other all of them
        for of in self.optimized:
            for key, value in of.optimizer.state.get(of.tensor, {}).items():
                self._add(of, key, value)

    def _add(self, of, key, value):
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
            # Of a shard, the ranks that have elements of it say this; of an empty parameter, all.
            if part.values.numel() or not prod(part.shape):
                self.scalars.setdefault(part.name, {})[key] = value

    def summary(self) -> RankState:
        """Return what this rank tells the others."""
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
        """Return the boxes that a rank, this one, writes."""
        own = defaultdict(dict)
        for name, boxes in self.tensors.items():
            for box, view in boxes.views.items():
                if layout.writes[name, box] == rank:
                    own[name][box] = view
        return {
            name: Boxes(self.tensors[name].shape, self.tensors[name].dtype, views)
            for name, views in own.items()
        }


class Loading:
    """Memory for what this rank will have, filled from a checkpoint before anything is changed.

    Args:
        state: this rank's state.
        tensors: {name: (shape, dtype)} of the checkpoint. What is not among them stays as it is.
        scalars: what the checkpoint's optimizer kept for each parameter as a whole.

    Attributes:
        tensors: {name: Boxes} to read into.

    Raises:
        CheckpointError: parameters that ZeRO keeps together have taken different numbers of steps.
    """

    state: State
    tensors: dict[str, Boxes]

    def __init__(
        self,
        state: State,
        tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        scalars: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.state, self.tensors, self._values, self._kept = state, {}, [], []
        for kind, parts in (("parameters", state.parameters), ("buffers", state.buffers)):
            for part in parts:
                if f"{kind}.{part.name}" in tensors:
                    memory = torch.zeros(part.values.numel(), dtype=part.values.dtype)
                    self._values.append((part, memory))
                    self._read(f"{kind}.{part.name}", part, memory)
        keys = defaultdict(list)
        for name in tensors:
            if name.startswith("optimizer."):
                _, key, parameter = name.split(".", 2)
                keys[parameter].append(key)
        for of in state.optimized:
            kept = {}
            for part, start in of.parts:
                for key in keys[part.name]:
                    _, dtype = tensors[f"optimizer.{key}.{part.name}"]
                    if key not in kept:
                        kept[key] = torch.zeros(of.tensor.numel(), dtype=dtype)
                    run = kept[key][start : start + part.values.numel()]
                    self._read(f"optimizer.{key}.{part.name}", part, run)
            kept = {key: memory.view(of.tensor.shape) for key, memory in kept.items()}
            self._kept.append((of, kept | _common(of, scalars)))

    def _read(self, name, part, memory):
        boxes = part.boxes(memory)
        if boxes.views:
            self.tensors[name] = boxes

    @torch.no_grad()
    def apply(self, options: list[dict[str, Any]], extra: Mapping[str, Any]) -> None:
        """Put what was read into the model and the optimizer.

        Args:
            options: of each parameter group.
            extra: the extra state of each module that has one.
        """
        zero = zero_of(self.state.model)
        if zero:
            zero.zero_grad()
        for optimizer in self.state.optimizers:
            number_of = {
                tensor: i
                for i, tensor in enumerate(
                    tensor for group in optimizer.param_groups for tensor in group["params"]
                )
            }
            states = {
                of.tensor: _in_layout_of(of.tensor, kept)
                for of, kept in self._kept
                if of.optimizer is optimizer and kept
            }
            optimizer.load_state_dict(
                {
                    "state": {number_of[tensor]: kept for tensor, kept in states.items()},
                    "param_groups": [
                        {
                            **_placed(option, group),
                            "params": [number_of[tensor] for tensor in group["params"]],
                        }
                        for option, group in zip(options, optimizer.param_groups, strict=True)
                    ],
                }
            )
            for tensor, kept in states.items():
                placed = optimizer.state[tensor]
                for key, value in kept.items():
                    if torch.is_tensor(value) and placed[key].dtype != value.dtype:
                        # Torch has cast it to the parameter's, as if it were of another precision.
                        placed[key] = value.to(placed[key].device)
        for part, memory in self._values:
            part.values.copy_(memory.view(part.values.shape))
        for name, module in self.state.with_extra.items():
            if name in extra:
                module.set_extra_state(extra[name])
        if zero:
            zero.refresh([flat for unit in zero.units for flat in unit.flats])  # frozen ones, too


def _common(of, scalars):
    """Return what the optimizer keeps for a tensor as a whole: what all its parameters have."""
    common, first = {}, None
    for part, _ in of.parts:
        for key, value in scalars.get(part.name, {}).items():
            if common.setdefault(key, value) != value:
                raise CheckpointError(
                    f"{first} and {part.name} have {key} {common[key]} and {value}, and ZeRO keeps "
                    "one for both: put them into different units or parameter groups"
                )
            first = part.name
    return {
        key: value.clone() if torch.is_tensor(value) else value for key, value in common.items()
    }


def _in_layout_of(param, kept):
    """Return what is kept for a parameter, element-wise tensors with the parameter's strides.

    A fused optimizer walks through the memory of both side by side, whatever their strides are.
    """
    return {
        key: torch.empty_like(param, dtype=value.dtype, device="cpu").copy_(value)
        if torch.is_tensor(value) and value.shape == param.shape
        else value
        for key, value in kept.items()
    }


def _flat(tensor):
    return tensor.detach().reshape(-1)


def _on_cpu(tensor):
    return tensor.detach().cpu()


def _placed(options, group):
    """Return options, with each tensor on the device of the one that is in a group now."""
    return {
        key: value.to(group[key].device)
        if torch.is_tensor(value) and torch.is_tensor(group.get(key))
        else value
        for key, value in options.items()
    }


def _options(group):
    """Return a group's options; tensors, such as a rate, on the CPU: ranks have other devices."""
    return {
        key: value.detach().cpu() if torch.is_tensor(value) else value
        for key, value in group.items()
        if key != "params"
    }
