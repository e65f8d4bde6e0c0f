"""Unpickle what ranks send, with its tensors on the CPU."""

from __future__ import annotations

import io
import pickle
from typing import Any


def received(pickled: bytes) -> Any:
    """Return a rank's value; tensors on a GPU become copies on the CPU.

    The notebook may see no GPUs, or different ones. If it sees the rank's GPU, a copy there would
    take memory that the ranks need.
    """
    return _Unpickler(io.BytesIO(pickled)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_on_cpu
        return super().find_class(module, name)


def _load_on_cpu(content):
    import torch

    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
