"""Infer what goes from one stage of a pipeline to the next, before anything is sent.

Copies of a stage's layers are tried on tensors that have a shape and no values. This costs no
memory, draws no random numbers, and leaves the layers as they were. Layers that need values can be
tried on a micro-batch instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version

from naranhi.pipeline.dry_run import CreatedTensors, copied, storages, without_a_trace

WAY_OUT = (
    'make the Pipeline with trial="data", which tries copies of the layers on a micro-batch instead'
)


class TensorMeta(NamedTuple):
    """A tensor without its values.

    Attributes:
        requires_grad: whether a gradient comes back for the tensor.
        kept: whether its storage is also that of a tensor that the stage keeps (a parameter, a
            buffer, another attribute), and may therefore change while it is being sent.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    kept: bool = False


class StageSignature(NamedTuple):
    """What a stage takes: a tensor, or a tuple of tensors."""

    specs: tuple[TensorMeta, ...]
    is_tuple: bool

    @classmethod
    def of(
        cls,
        value: torch.Tensor | tuple[torch.Tensor, ...],
        kept: Collection[torch.UntypedStorage] = frozenset(),
    ) -> StageSignature:
        """Return the signature of a tensor or a tuple of tensors.

        Args:
            value: the tensor or tuple.
            kept: the storages that a stage keeps.
        """
        specs = [
            TensorMeta(
                tuple(tensor.shape),
                tensor.dtype,
                tensor.requires_grad,
                bool(kept) and tensor.untyped_storage() in kept,
            )
            for tensor in _as_tuple(value)
        ]
        return cls(tuple(specs), isinstance(value, tuple))

    def __str__(self) -> str:
        return ", ".join(f"{spec.dtype} {spec.shape}" for spec in self.specs)

    def describe(self) -> str:
        """Return the whole signature in words."""
        return "a tuple of " * self.is_tuple + ", ".join(
            f"{spec.dtype} {spec.shape}" + " requiring a gradient" * spec.requires_grad
            for spec in self.specs
        )

    def value(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the tensors as a layer takes them.

        None of them is a leaf that requires a gradient, because autograd does not let a layer
        change such a leaf in place.
        """
        tensors = [_Entry.apply(tensor) if tensor.requires_grad else tensor for tensor in tensors]
        return tuple(tensors) if self.is_tuple else tensors[0]

    def note_changes(
        self, value: torch.Tensor | tuple[torch.Tensor, ...], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Tell autograd which tensors a layer has changed in place through `value(tensors)`.

        Another stage on this rank may have saved them for its backward, which must then fail.

        Args:
            value: what `value(tensors)` returned.
            tensors: the tensors themselves.
        """
        for entry, tensor in zip(_as_tuple(value), tensors, strict=True):
            if entry is not tensor and entry._version:
                increment_version(tensor)

    def require(
        self, value: torch.Tensor | tuple[torch.Tensor, ...], number: int, layer: nn.Module
    ) -> None:
        """Raise ValueError unless what a layer has returned can be sent with this signature.

        A tensor may require no gradient where the signature expects one: the gradient is then
        dropped.

        Args:
            value: what the layer has returned.
            number: the layer's index in the model, for the error.
            layer: the layer, for the error.
        """
        tensors = _as_tuple(value)
        if (
            isinstance(value, tuple) != self.is_tuple
            or len(tensors) != len(self.specs)
            or any(
                tensor.shape != spec.shape
                or tensor.dtype != spec.dtype
                or tensor.requires_grad > spec.requires_grad
                for tensor, spec in zip(tensors, self.specs, strict=True)
            )
        ):
            raise ValueError(
                f"{name_of(number, layer)} returned {StageSignature.of(value).describe()}, and "
                f"{self.describe()} when it was tried: what a stage returns may change from step "
                "to step with the inputs' shapes, autocast, the grad mode, and the layers' modes "
                "and parameters; after any other change make a new Pipeline"
            )

    def detached(self, value: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Return the tensors to be sent: copies where the stage keeps the storage."""
        return [
            tensor.detach().clone() if spec.kept else tensor.detach()
            for tensor, spec in zip(_as_tuple(value), self.specs, strict=True)
        ]

    def edges(self, value: torch.Tensor | tuple[torch.Tensor, ...]) -> list[GradientEdge | None]:
        """Return, for each tensor that gets a gradient, its edge in the autograd graph or None."""
        return [
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, spec in zip(_as_tuple(value), self.specs, strict=True)
            if spec.requires_grad
        ]

    def message(self, kind: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return (shape, dtype) of each tensor that is sent, as "activation" or as "gradient"."""
        return [spec[:2] for spec in self.specs if kind == "activation" or spec.requires_grad]


class _Entry(torch.autograd.Function):
    """Make a tensor with the storage of a leaf, which is neither a leaf nor a view itself."""

    @staticmethod
    def forward(ctx, leaf):
        return leaf.data

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def infer(layers: Iterable[nn.Module], boundary: StageSignature, first: int = 0) -> StageSignature:
    """Return the `StageSignature` after some layers, by trying copies of them on shapes.

    The caller's circumstances apply: autocast, the grad mode, the layers' modes. Hooks run, and
    what lies outside the layers is used as it is.

    Args:
        layers: the layers of a stage.
        boundary: the signature before them.
        first: the index of the first layer in the model.

    Raises:
        TypeError: a layer returns anything but a tensor or a tuple of tensors.
        ValueError: a layer does not take its input, or needs values (the cause is attached); or a
            cache or a hook outside the layers keeps a tensor of the trial, which it would later
            find without values.
    """
    layers, mode = list(layers), FakeTensorMode(allow_non_fake_inputs=True)
    with without_a_trace(), mode, CreatedTensors(name_of(first, layers[0])) as created:
        with FakeCopyMode(mode):
            copies = copied(layers)
        created.record_layers(copies)
        value = boundary.value(
            [
                torch.empty(
                    spec.shape,
                    dtype=spec.dtype,
                    device=_device(layers),
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
) -> tuple[StageSignature, list[torch.Tensor]]:
    """Return the `StageSignature` after some layers, and the tensors there, by a trial on data.

    Like `infer`, but the copies need as much memory as the layers. Random numbers that the trial
    draws are drawn again afterwards.

    Args:
        layers: the layers of a stage.
        boundary: the signature before them.
        tensors: their inputs, as `boundary` describes them, on any device.
        first: the index of the first layer in the model.
    """
    layers = list(layers)
    device = _device(layers)
    with without_a_trace(), torch.random.fork_rng([device] if device.type == "cuda" else []):
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
        return (
            StageSignature.of(value, storages(copies)),
            [tensor.detach() for tensor in _as_tuple(value)],
        )


def _device(layers):
    return next(
        (
            tensor.device
            for layer in layers
            for tensor in chain(layer.parameters(), layer.buffers())
        ),
        torch.device("cpu"),
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


def name_of(number: int, layer: nn.Module) -> str:
    """Return how errors name a layer of the model."""
    return f"layer {number} ({type(layer).__name__})"


def require_tensors(value: object, number: int, layer: nn.Module) -> None:
    """Raise TypeError unless a layer has returned a tensor or a tuple of tensors."""
    wrong = [
        type(element).__name__
        for element in _as_tuple(value)
        if not isinstance(element, torch.Tensor)
    ]
    if wrong or not _as_tuple(value):
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
    for tensor in _as_tuple(value):
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            raise TypeError(
                f"{name_of(number, layer)} returned {type(tensor).__name__} {tensor.dtype} "
                f"{tuple(tensor.shape)} without values: it is on the meta device, or uses a tensor "
                "that a cache has kept from a trial on shapes"
            )


def _as_tuple(value):
    return value if isinstance(value, tuple) else (value,)
