"""Ranks in a notebook: a World of processes that live as long as the notebook.

Imported on demand: helper processes use parts of it that need no torch.
"""

import importlib

_HOME = {
    "RankError": "errors",
    "RankInterrupt": "errors",
    "World": "world",
}
__all__ = ["RankError", "RankInterrupt", "World"]


def __getattr__(name):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
