"""Checks that ranks and one process have the same model before their steps are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from naranhi.distributed import agree, from_all_ranks, raise_on_all
from naranhi.divergence.models import shapes_of
from naranhi.divergence.recorder import Key, Recorder
from naranhi.divergence.reference import Reference
from naranhi.pipeline import Pipeline
from naranhi.zero import Zero


def require_same_model(
    model: Any, reference: Reference, update: Callable[[Any], object] | None
) -> None:
    """Raise on every rank unless the ranks hold the parameters of the reference.

    Args:
        model: this rank's part of the model.
        reference: one process's step.
        update: as passed to `find`.

    Raises:
        ValueError: a parameter, or its shape, is not in the reference, or none of the ranks has it;
            the ranks' references differ; the model computes as one process cannot.
        RuntimeError: only one of `trace` and `find` was given an update.
    """
    raise_on_all(lambda: _require_supported(model), kind=ValueError)
    agree(
        layers_of_one_process=sorted(reference.layers),
        parameters_of_one_process={name: _shape(name, reference) for name in reference.parameters},
        batch_of_one_process=[tensor.shape for tensor in reference.inputs.values()],
        phases_of_one_process=sorted({key.phase for key in reference.values}),
    )
    agree(an_update_is_given=update is not None)
    agree(values_of_the_batch=torch.cat([x.double().flatten() for x in reference.inputs.values()]))
    if (update is None) != (reference.stepped is None):
        has, lacks = ("trace", "find") if update is None else ("find", "trace")
        raise RuntimeError(f"{has} was given an update, and {lacks} was not: give it to both")
    shapes = from_all_ranks({name: tuple(shape) for name, shape in shapes_of(model).items()})
    for rank, shape_of in enumerate(shapes):
        for name, shape in sorted(shape_of.items()):
            if name not in reference.parameters:
                raise ValueError(
                    f"rank {rank} has a parameter {name}, and the model of one process has none "
                    f"of this name: trace the unsplit model, whose layers have the same names"
                )
            if shape != (expected := _shape(name, reference)):
                raise ValueError(
                    f"rank {rank} has a parameter {name} of shape {shape} before the split, but it "
                    f"has the shape {expected} in the model of one process: trace the same model"
                )
    if missing := reference.parameters.keys() - {name for own in shapes for name in own}:
        raise ValueError(
            f"no rank has the parameter {min(missing)}, which the model of one process has: "
            "trace the same model"
        )


def require_calls(records: Recorder) -> None:
    """Raise RuntimeError unless a step has been recorded."""
    if not records.outputs:
        raise RuntimeError("run(model) has called no layer of the model: it should run a step")


def _require_supported(model):
    if isinstance(model, Zero) and model.precision != "fp32":
        raise ValueError(
            f"a Zero of precision {model.precision!r} computes in a different dtype from the "
            "model of one process, so it rounds differently: compare one of precision 'fp32'"
        )
    if isinstance(model, Pipeline) and model.sharded is not None:
        raise ValueError(
            "a Pipeline with sharded stages has no whole gradients to compare: compare one without "
            "sharding, whose schedule does not gather"
        )


def _shape(name, reference):
    return tuple(reference.values[Key("gradient", reference.parameters[name])].shape)
