"""Naranhi: distributed training, written small and run on real ranks.

`naranhi.World` starts ranks for a notebook. The kernels live in separate packages
(`naranhi.collectives`, ...) and do not depend on notebooks.
"""

import importlib
from typing import Any

__all__ = ["RankError", "World"]

MOVED = {
    "activation_memory": "naranhi.autograd (SavedTensors) and naranhi.costs",
    "corpus": "naranhi.data",
    "gradient_norm": "naranhi.tensor_parallel (clip_grad_norm_)",
    "hardware": "naranhi.measure",
    "judge": "naranhi.schedules (grade)",
    "links": "naranhi.distributed.links",
    "mesh": "naranhi.distributed (Mesh)",
    "paced": "naranhi.models (Paced)",
    "partition": "naranhi.pipeline",
    "profiling": "naranhi.pipeline (profile)",
    "recomputation": "naranhi.autograd",
    "rendezvous": "naranhi.distributed (join)",
    "saving": "naranhi.autograd",
    "simulate": "naranhi.schedules",
    "split_backward": "naranhi.autograd",
    "streams": "naranhi.distributed.streams",
    "timeline": "naranhi.measure (Recorder)",
    "transformer_layer": "naranhi.models",
}


def __getattr__(name: str) -> Any:
    # Import on demand: a process under torchrun must not import ipyparallel, and a helper process
    # must not import torch.
    if name in __all__:
        return getattr(importlib.import_module("naranhi.world"), name)
    if name in MOVED:  # `from naranhi import ...` would replace an AttributeError
        raise ImportError(f"naranhi.{name} has moved to {MOVED[name]}")
    try:
        return importlib.import_module(f"naranhi.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != f"naranhi.{name}":
            raise
        raise AttributeError(f"module 'naranhi' has no attribute {name!r}") from None
