"""One process's step, in its own precision and in float64, with which ranks are compared.

How far ranks may be from one process is in `tolerance`.

An optimizer may amplify rounding errors: Adam turns a gradient that is zero except for rounding
into a full step. So the bound of weights also includes how far the step moves them if all gradients
are shifted up, or all down, by their bounds (`_slack`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from naranhi.divergence.axes import Part
from naranhi.divergence.models import (
    copied,
    gradients_of,
    layers_of,
    parameters_of,
    recorded_layers,
    weights_of,
)
from naranhi.divergence.promoted import Promoted, cast
from naranhi.divergence.random_states import (
    OwnGenerators,
    random_states,
    same_states,
    set_random_states,
)
from naranhi.divergence.recorder import Key, Recorder, row_size
from naranhi.divergence.tolerance import FLOAT64, bound, largest


@dataclass
class Reference:
    """The record of a step in one process.

    It holds, for every layer, its outputs and their gradients for the whole batch, in float64, and
    every parameter's gradient and value.

    Attributes:
        first: the name of the layer that takes the batch.
        inputs: {place among the tensors that it takes: the tensor, all micro-batches concatenated}
            of those with a row of the batch for each index; a mask that all rows share has not.
        rows: the number of rows of the batch.
        microbatches: the number of micro-batches of the step.
        values: {key with micro-batch 0: the whole tensor}, in the order of the step.
        noise: {key: the largest distance of this dtype's result from float64's}; of a model in
            float64, that of float32, scaled.
        bounds: {key: how far a rank's tensor may be from float64's}; see the note in `tolerance`.
        by_rows: {key: rows of a micro-batch} of the tensors whose first dimension is the batch.
        parameters: {name: the first name of the same parameter}: a tied one has several names.
        layers: the names of the layers.
        masks: {key: the number of a mask's elements for one row of the batch}.
        draws: whether the step draws random numbers. If so, ranks draw different ones, and `find`
            compares the ranks with each other.
        stepped: whether an optimizer stepped; None without an update.
    """

    first: str
    inputs: dict[int, torch.Tensor]
    rows: int
    microbatches: int
    values: dict[Key, torch.Tensor]
    noise: dict[Key, float]
    bounds: dict[Key, float]
    by_rows: dict[Key, int]
    parameters: dict[str, str]
    layers: set[str]
    masks: dict[Key, int]
    draws: bool
    stepped: bool | None

    def allowed(self, key: Key) -> float:
        """Return how far a rank's tensor may be from float64, in any micro-batch."""
        return self.bounds[key._replace(microbatch=0)]


def trace(
    model: nn.Module | list[nn.Module],
    run: Callable[[Any], object],
    *,
    update: Callable[[Any], object] | None = None,
) -> Reference:
    """Run a step in one process, on copies of a model, and return what every layer computed.

    The step is run in the model's dtype and in float64; for a model in float64, in float32 and
    float64. The model and the states of the random number generators stay as they were.
    Every rank calls this by itself, with the same model and the same whole batch.

    Args:
        model: the unsplit model: a module, or a list of layers.
        run: `run(model)` runs the forwards and backwards of a step, over all micro-batches, so that
            parameters have their gradients. Loss and gradients are those of the whole batch.
        update: `update(model)` makes an optimizer, and may clip before its step; it is called for
            several copies.

    Raises:
        RuntimeError: `run` has not called any of the model's layers.
    """
    before = random_states()
    try:
        params = [param for param in parameters_of(model).values() if param.is_floating_point()]
        is_double = bool(params) and all(param.dtype == torch.float64 for param in params)
        with OwnGenerators({}) as own:
            single, records = _record(model, run, torch.float32 if is_double else None)
        draws = not same_states(before, random_states())
        set_random_states(before)
        with OwnGenerators(own.states) as again:
            double, exact = _record(model, run, torch.float64)
        draws = draws or again.advanced
        scale = FLOAT64 if is_double else 1.0
        slack = _slack(single, double, update, scale) if update else {}
        step, exact_step = Update(single, update), Update(double, update)
    finally:
        set_random_states(before)
        for generator, state in own.states.items():
            generator.set_state(state)
    if records.first is None:
        raise RuntimeError("run(model) has called no layer of the model: it should run a step")
    names = _first_names(parameters_of(model))
    own, referee = _whole(records, step, names), _whole(exact, exact_step, names)
    if is_double:
        records.inputs = exact.inputs  # rows as the ranks take them
    return _reference(model, records, own, referee, draws, step.stepped, slack, scale)


class Update:
    """The record of a step's update: gradients before it and in the optimizer, weights after it.

    Args:
        model: the model, or this rank's part of it.
        update: as `trace` takes it.

    Attributes:
        parts: {phase: {parameter: this rank's part}} of "gradient" and, with an update, of "norm"
            (if an optimizer stepped) and "weights".
        stepped: whether an optimizer stepped; None without an update.
    """

    parts: dict[str, dict[str, Part]]
    stepped: bool | None

    def __init__(self, model: Any, update: Callable[[Any], object] | None) -> None:
        self.parts = {"gradient": gradients_of(model)}
        self.stepped = None
        if update is None:
            return
        self.stepped = False

        def before(optimizer, args, kwargs):
            self.stepped = True
            self.parts["norm"] = gradients_of(model)

        handle = register_optimizer_step_pre_hook(before)
        try:
            update(model)
        finally:
            handle.remove()
        self.parts["weights"] = weights_of(model)


def _slack(single, double, update, scale):
    """Return {parameter: how far its weights move if gradients are off by their bounds}."""
    exact, weights, slack = parameters_of(double), [], {}
    allowed = {
        name: scale * bound(param.grad, exact[name].grad)
        for name, param in parameters_of(single).items()
        if param.grad is not None
    }
    for sign in (0, 1, -1):
        moved = copied(double)
        for name, param in parameters_of(moved).items():
            if name in allowed:
                param.grad = exact[name].grad + sign * allowed[name]
        update(moved)
        weights.append({name: param.detach() for name, param in parameters_of(moved).items()})
    for name, plain in weights[0].items():
        gaps = [(other[name] - plain) for other in weights[1:]]
        slack[name] = max(largest(gap[gap.isfinite()]) for gap in gaps)
    return slack


def _record(model, run, dtype):
    model = copied(model)
    layers = layers_of(model)
    handles = []
    if dtype is not None:
        nn.ModuleList(layers.values()).to(dtype)
        handles = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: cast((args, kwargs), dtype), with_kwargs=True
            )
            for layer in layers.values()
        ]
    recorder = Recorder(recorded_layers(layers), None, masks=dtype != torch.float64)
    with recorder as records, Promoted(dtype):
        run(model)
    for handle in handles:
        handle.remove()
    return model, records


def _whole(records, step, names):
    """Return {key with micro-batch 0: tensors of the micro-batches} of a step."""
    values = {}
    # One backward of several micro-batches runs through them from the last to the first.
    for key, tensor in sorted(records.values().items(), key=lambda item: item[0].microbatch):
        values.setdefault(key._replace(microbatch=0), []).append(tensor)
    for phase, parts in step.parts.items():
        # Gradients are complete in the order of the backward: the last layer's first.
        for name, part in reversed(parts.items()):
            values.setdefault(Key(phase, names[name]), [part.value])
    return values


def _first_names(params):
    first = {}
    return {name: first.setdefault(param, name) for name, param in params.items()}


def _is_constant(parts):
    """Return whether an output is the same in all micro-batches, such as a table of positions.

    A single number is left out, because with one micro-batch nothing tells a loss from a constant.
    """
    return parts[0].numel() > 1 and all(torch.equal(part, parts[0]) for part in parts)


def _reference(model, records, own, referee, draws, stepped, slack, scale):
    rows = [len(tensors[0]) for tensors in records.inputs]
    values, noise, bounds, by_rows = {}, {}, {}, {}
    for key, parts in own.items():
        is_batch = key.phase in ("forward", "backward") and all(
            part.dim() and len(part) == count for part, count in zip(parts, rows, strict=False)
        )
        if is_batch:
            by_rows[key] = len(parts[0])
        elif key.phase == "backward":
            continue  # a sum over a micro-batch's rows: its parameters' gradients show it
        elif key.phase == "forward" and not _is_constant(referee[key]):
            continue  # of a whole micro-batch, such as its loss, which differs on ranks
        whole = torch.cat(parts) if is_batch else parts[0]
        exact = torch.cat(referee[key]) if is_batch else referee[key][0]
        values[key], noise[key], bounds[key] = whole, 0.0, 0.0
        if whole.dtype.is_floating_point:
            finite = whole.isfinite() & exact.isfinite()
            # In a model in float64, `whole` is float32's, which may be infinite on its own.
            values[key] = torch.where(finite | (scale != 1), exact, whole.double())
            noise[key] = scale * largest((whole.double() - exact)[finite])
            bounds[key] = scale * bound(whole, exact)
            if key.phase == "weights":
                bounds[key] += slack[key.layer]
    masks = {
        Key("mask", layer, 0, number): row_size(mask)
        for layer, drawn in records.masks.items()
        if len(drawn) % len(rows) == 0
        for number, (_, mask) in enumerate(drawn[: len(drawn) // len(rows)])
    }
    return Reference(
        first=records.first,
        inputs={
            place: torch.cat(tensors)
            for place, tensors in enumerate(zip(*records.inputs, strict=True))
            if [len(tensor) for tensor in tensors] == rows
        },
        rows=sum(rows),
        microbatches=len(rows),
        values=values,
        noise=noise,
        bounds=bounds,
        by_rows=by_rows,
        parameters=_first_names(parameters_of(model)),
        layers=set(layers_of(model)),
        masks=masks,
        draws=draws,
        stepped=stepped,
    )
