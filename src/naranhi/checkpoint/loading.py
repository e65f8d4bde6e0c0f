"""What is read from a checkpoint, put into a model and its optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from naranhi.checkpoint import rest
from naranhi.checkpoint.boxes import Boxes
from naranhi.checkpoint.parts import zero_of
from naranhi.checkpoint.state import State
from naranhi.checkpoint.storage import CheckpointError


class Loading:
    """Memory for what this rank will have, filled from a checkpoint before anything is changed.

    Args:
        state: this rank's state.
        tensors: {name: (shape, dtype)} of the checkpoint. Anything else stays unchanged.
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
            options: the options of each parameter group.
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
                        # Torch has cast it to the parameter's dtype: restore the saved dtype.
                        placed[key] = value.to(placed[key].device)
        for part, memory in self._values:
            part.values.copy_(memory.view(part.values.shape))
        for name, module in self.state.with_extra.items():
            if name in extra:
                module.set_extra_state(extra[name])
        if zero:
            zero.refresh([flat for unit in zero.units for flat in unit.flats])  # frozen ones, too


def _common(of, scalars):
    """Return what the optimizer keeps once for a tensor, on which its parameters must agree."""
    names = [part.name for part, _ in of.parts]
    common = scalars.get(names[0], {}) if names else {}
    for name in names:
        own = scalars.get(name, {})
        for key in {**common, **own}:
            values = common.get(key, "none"), own.get(key, "none")
            if not rest.same(*values):
                raise CheckpointError(
                    f"{names[0]} and {name} have {key} {values[0]} and {values[1]}, and ZeRO keeps "
                    "one for both: put them into different units or parameter groups"
                )
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


def _placed(options, group):
    """Return options, with each tensor on the device of the one that it replaces in a group."""
    return {
        key: value.to(group[key].device)
        if torch.is_tensor(value) and torch.is_tensor(group.get(key))
        else value
        for key, value in options.items()
    }
