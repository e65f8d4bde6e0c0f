"""Infer the tensors that a pipeline stage sends to the next, before anything is sent.

Copies of a stage's layers are tried on tensors that have a shape and no values. This costs no
memory, draws no random numbers, and leaves the layers as they were. Layers that need values can be
tried on a micro-batch instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

from naranhi.autograd.graph import strangers
from naranhi.pipeline.dry_run import CreatedTensors, copied, storages, tried, without_a_trace
from naranhi.pipeline.stage_signature import StageSignature, as_tuple, name_of

WAY_OUT = (
    'make the Pipeline with trial="data", which tries copies of the layers on a micro-batch instead'
)


def infer(
    layers: Iterable[nn.Module],
    boundary: StageSignature,
    first: int = 0,
    device: torch.device | None = None,
) -> StageSignature:
    """Return the `StageSignature` after some layers, by trying copies of them on shapes.

    The caller's circumstances apply: autocast, the grad mode, the layers' modes. Hooks run, and
    what lies outside the layers is used as it is.

    Args:
        layers: the layers of a stage.
        boundary: the signature before them.
        first: the index of the first layer in the model.
        device: where to try layers without parameters and buffers; None for the CPU.

    Raises:
        TypeError: a layer returns anything but a tensor or a tuple of tensors.
        ValueError: a layer does not take its input, or needs values (the cause is attached); a
            layer uses a parameter that is registered in none of the layers; or a cache or a hook
            outside the layers keeps a tensor of the trial, which it would later find without
            values.
    """
    layers = list(layers)
    return tried(lambda hiding: _infer(layers, boundary, first, device, hiding))


def _infer(layers, boundary, first, device, hiding):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with without_a_trace(hiding), mode, CreatedTensors(name_of(first, layers[0])) as created:
        with FakeCopyMode(mode):
            copies = copied(layers)
        created.record_layers(copies)
        value = boundary.value(
            [
                torch.empty(
                    spec.shape,
                    dtype=spec.dtype,
                    device=_device(layers, device),
                    requires_grad=spec.requires_grad,
                )
                for spec in boundary.specs
            ]
        )
        for number, layer in enumerate(copies, first):
            created.creator = name_of(number, layer)
            value = _tried(
                number,
                layer,
                value,
                " (layers are tried on shapes, without values: for one that needs "
                f"values, {WAY_OUT})",
            )
        _refuse_strangers(value, [*layers, *copies], first)
        result = StageSignature.of(value, storages(copies))
    del copies, layer, value
    survivor = created.survivor()
    if survivor:
        tensor, creator = survivor
        raise ValueError(
            f"{creator} was tried on shapes, and a tensor of {tensor.dtype} {tuple(tensor.shape)} "
            "that it made there, without values, is kept outside of the layers, by a cache or a "
            f"hook: empty that, and {WAY_OUT}"
        )
    return result


def infer_data(
    layers: Iterable[nn.Module],
    boundary: StageSignature,
    tensors: Iterable[torch.Tensor],
    first: int = 0,
    device: torch.device | None = None,
) -> tuple[StageSignature, list[torch.Tensor]]:
    """Return the `StageSignature` after some layers, and the tensors there, by a trial on data.

    Like `infer`, with the same errors, but the copies need as much memory as the layers. Random
    numbers that the trial draws are drawn again afterwards.

    Args:
        layers: the layers of a stage.
        boundary: the signature before them.
        tensors: their inputs, as `boundary` describes them, on any device.
        first: the index of the first layer in the model.
        device: where to try layers without parameters and buffers; None for the CPU.
    """
    layers, device = list(layers), _device(layers, device)
    return tried(lambda hiding: _infer_data(layers, boundary, tensors, first, device, hiding))


def _infer_data(layers, boundary, tensors, first, device, hiding):
    devices = [device] if device.type == "cuda" else []
    with without_a_trace(hiding), torch.random.fork_rng(devices):
        copies = copied(layers)
        value = boundary.value(
            [
                tensor.detach().to(device, copy=True).requires_grad_(spec.requires_grad)
                for tensor, spec in zip(tensors, boundary.specs, strict=True)
            ]
        )
        for number, layer in enumerate(copies, first):
            value = _tried(number, layer, value)
            require_values(value, number, layer)
        _refuse_strangers(value, [*layers, *copies], first)
        return (
            StageSignature.of(value, storages(copies)),
            [tensor.detach() for tensor in as_tuple(value)],
        )


def _device(layers, default):
    return next(
        (
            tensor.device
            for layer in layers
            for tensor in chain(layer.parameters(), layer.buffers())
        ),
        default or torch.device("cpu"),
    )


def _tried(number, layer, value, hint=""):
    taken = StageSignature.of(value)
    try:
        value = layer(value)
    except Exception as error:
        raise ValueError(
            f"{name_of(number, layer)} fails on {taken}: {error or type(error).__name__}{hint}"
        ) from error
    require_tensors(value, number, layer)
    return value


def _refuse_strangers(value, layers, first):
    """Raise ValueError if outputs depend on a parameter that none of a stage's layers has.

    Another stage may have it: each would then add its part of the gradient to its own copy.
    """
    nodes = [tensor.grad_fn for tensor in as_tuple(value) if tensor.grad_fn is not None]
    for leaf in strangers(nodes, nn.ModuleList(layers).parameters()):
        if isinstance(leaf, nn.Parameter):
            raise ValueError(
                f"the stage that begins at layer {first} uses a parameter of shape "
                f"{tuple(leaf.shape)} that is registered in none of its layers: if another stage "
                "has it, its gradient would be incomplete; make it an attribute of the module "
                "that uses it, and the copies are tied"
            )


def require_tensors(value: object, number: int, layer: nn.Module) -> None:
    """Raise TypeError unless a layer has returned a tensor or a tuple of tensors."""
    wrong = [
        type(element).__name__
        for element in as_tuple(value)
        if not isinstance(element, torch.Tensor)
    ]
    if wrong or not as_tuple(value):
        what = f"a tuple with {wrong[0]} in it" if wrong else "an empty tuple"
        what = what if isinstance(value, tuple) else wrong[0]
        raise TypeError(
            f"{name_of(number, layer)} returned {what}, not a tensor or a tuple of tensors"
        )


def require_values(value: object, number: int, layer: nn.Module) -> None:
    """Raise TypeError as `require_tensors` does, and also for a tensor without values."""
    if type(value) is torch.Tensor and not value.is_meta:
        return
    require_tensors(value, number, layer)
    for tensor in as_tuple(value):
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            raise TypeError(
                f"{name_of(number, layer)} returned {type(tensor).__name__} {tensor.dtype} "
                f"{tuple(tensor.shape)} without values: it is on the meta device, or uses a tensor "
                "that a cache has kept from a trial on shapes"
            )
