"""Naranhi: distributed training, written small and run on real ranks.

``naranhi.World`` starts ranks for a notebook; the kernels are modules of their own
(``naranhi.collectives``, ...) and know nothing of notebooks.
"""

import importlib

__all__ = ["RankError", "World"]


def __getattr__(name):
    # Only on demand: under torchrun nothing should import ipyparallel, nor a helper process torch.
    if name in __all__:
        return getattr(importlib.import_module("naranhi.world"), name)
    try:
        return importlib.import_module(f"naranhi.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != f"naranhi.{name}":
            raise
        raise AttributeError(f"module 'naranhi' has no attribute {name!r}") from None
