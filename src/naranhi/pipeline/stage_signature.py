"""The shapes and dtypes of the tensors at a stage's boundary: a `StageSignature`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version


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
    """A stage's input without values: a tensor, or a tuple of tensors."""

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
                _needs_gradient(tensor),
                bool(kept) and tensor.untyped_storage() in kept,
            )
            for tensor in as_tuple(value)
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
        for entry, tensor in zip(as_tuple(value), tensors, strict=True):
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
        tensors = as_tuple(value)
        if (
            isinstance(value, tuple) != self.is_tuple
            or len(tensors) != len(self.specs)
            or any(
                tensor.shape != spec.shape
                or tensor.dtype != spec.dtype
                or _needs_gradient(tensor) > spec.requires_grad
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
            for tensor, spec in zip(as_tuple(value), self.specs, strict=True)
        ]

    def edges(self, value: torch.Tensor | tuple[torch.Tensor, ...]) -> list[GradientEdge | None]:
        """Return, for each tensor that gets a gradient, its edge in the autograd graph or None."""
        return [
            get_gradient_edge(tensor) if _needs_gradient(tensor) else None
            for tensor, spec in zip(as_tuple(value), self.specs, strict=True)
            if spec.requires_grad
        ]

    def message(self, kind: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return (shape, dtype) of each tensor that is sent, as "activation" or as "gradient"."""
        return [spec[:2] for spec in self.specs if kind == "activation" or spec.requires_grad]


def _needs_gradient(tensor):
    # Under `no_grad`, a parameter or its view may require a gradient, but is in no graph.
    return tensor.requires_grad and torch.is_grad_enabled()


class _Entry(torch.autograd.Function):
    """Make a tensor that shares a leaf's storage, but is neither a leaf nor a view."""

    @staticmethod
    def forward(ctx, leaf):
        return leaf.data

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def name_of(number: int, layer: nn.Module) -> str:
    """Return the name of a layer in error messages."""
    return f"layer {number} ({type(layer).__name__})"


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a tuple as it is, and anything else as the one element of a tuple."""
    return value if isinstance(value, tuple) else (value,)
