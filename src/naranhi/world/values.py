"""Pickle what the notebook and the ranks send each other, and unpickle it in the notebook."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle

UNSTORED = (  # dtypes, of whose tensors torch 2.13 writes pickles that it cannot read
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "uint16",
    "uint32",
    "uint64",
    "complex32",
)
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by size in bytes


def pickled(value: Any) -> bytes:
    """Return a cloudpickle of a value: functions of a notebook are sent as code."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def received(pickled: bytes) -> Any:
    """Return a rank's value; tensors on a GPU become copies on the CPU.

    The notebook may see no GPUs, or different ones. If it sees the rank's GPU, a copy there would
    take memory that the ranks need.
    """
    return _Unpickler(io.BytesIO(pickled)).load()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        if (type(obj).__module__, type(obj).__name__) == ("torch", "Tensor"):
            name = str(obj.dtype).removeprefix("torch.")
            if name in UNSTORED:
                return _viewed, (_viewed(obj.detach(), INTEGERS[obj.element_size()]), name)
        return super().reducer_override(obj)


def _viewed(tensor, dtype):
    """Return the same bytes as another dtype of the same size."""
    import torch

    return tensor.view(getattr(torch, dtype))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_on_cpu
        return super().find_class(module, name)


def _load_on_cpu(content):
    import torch

    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
