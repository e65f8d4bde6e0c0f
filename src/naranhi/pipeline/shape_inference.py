"""What goes from one stage of a pipeline to the next: known before anything is sent.

Copies of a stage's layers are tried on tensors that have a shape and no values. This costs no
memory, draws no random numbers, and leaves the layers as they were. Layers that need values can be
tried on a micro-batch instead.
"""

from itertools import chain
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge, increment_version

from naranhi.pipeline.dry_run import CreatedTensors, copied, storages, without_a_trace

WAY_OUT = (
    'make the Pipeline with trial="data", which tries copies of the layers on a micro-batch instead'
)


class TensorMeta(NamedTuple):
    """A tensor without its values.

    requires_grad: a gradient comes back for it. kept: its storage is also that of a tensor that the
    stage keeps (a parameter, a buffer, another attribute) and may change while it is being sent.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    kept: bool = False


class StageSignature(NamedTuple):
    """What a stage takes: a tensor, or a tuple of them."""

    specs: tuple[TensorMeta, ...]
    is_tuple: bool

    @classmethod
    def of(cls, value, kept=frozenset()):
        """Return that of a tensor or a tuple of tensors. kept: the storages that a stage keeps."""
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

    def __str__(self):
        return ", ".join(f"{spec.dtype} {spec.shape}" for spec in self.specs)

    def describe(self):
        """Return all of it in words."""
        return "a tuple of " * self.is_tuple + ", ".join(
            f"{spec.dtype} {spec.shape}" + " requiring a gradient" * spec.requires_grad
            for spec in self.specs
        )

    def value(self, tensors):
        """Return the tensors as a layer takes them.

        Autograd does not let a layer change a leaf in place, so none of them is a leaf.
        """
        tensors = [_Entry.apply(tensor) if tensor.requires_grad else tensor for tensor in tensors]
        return tuple(tensors) if self.is_tuple else tensors[0]

    def note_changes(self, value, tensors):
        """Tell autograd which tensors a layer has changed in place, by way of `value(tensors)`.

        Another stage on this rank may have saved them for its backward, which must then fail.
        """
        for entry, tensor in zip(_as_tuple(value), tensors, strict=True):
            if entry is not tensor and entry._version:
                increment_version(tensor)

    def require(self, value, number, layer):
        """Raise ValueError unless the value that a layer has returned can be sent as this says.

        A tensor may require no gradient where this expects one: the gradient is then dropped.
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

    def detached(self, value):
        """Return the tensors to be sent: copies where the stage keeps the storage."""
        return [
            tensor.detach().clone() if spec.kept else tensor.detach()
            for tensor, spec in zip(_as_tuple(value), self.specs, strict=True)
        ]

    def edges(self, value):
        """Return, for each tensor for which a gradient comes, its place in the graph or None."""
        return [
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, spec in zip(_as_tuple(value), self.specs, strict=True)
            if spec.requires_grad
        ]

    def message(self, kind):
        """Return (shape, dtype) of each tensor that is sent: as "activation" or as "gradient"."""
        return [spec[:2] for spec in self.specs if kind == "activation" or spec.requires_grad]


class _Entry(torch.autograd.Function):
    """A tensor with the storage of a leaf that is neither a leaf nor a view."""

    @staticmethod
    def forward(ctx, leaf):
        return leaf.data

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def infer(layers, boundary, first=0):
    """Return the StageSignature after some layers, by trying copies of them on shapes.

    first: the model's number of the first layer. The caller's circumstances hold: autocast, the
    grad mode, the layers' modes. Hooks run, and what lies outside of the layers is used as it is.

    Raises TypeError if a layer returns anything but a tensor or a tuple of tensors. Raises
    ValueError, with the cause, if a layer does not take its input or needs values; and if a cache
    or a hook outside of the layers keeps a tensor of the trial, which it would later find without
    values.
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


def infer_data(layers, boundary, tensors, first=0):
    """Return the StageSignature after some layers and the tensors there, by a trial on real
    tensors.

    As `infer`, but the copies need as much memory as the layers. tensors: as `boundary` says, on
    any device. Random numbers that the trial draws are drawn again afterwards.
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


def name_of(number, layer):
    """Return what an error calls a layer of the model."""
    return f"layer {number} ({type(layer).__name__})"


def require_tensors(value, number, layer):
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


def require_values(value, number, layer):
    """Do as `require_tensors`; raise TypeError also for a tensor without values."""
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
