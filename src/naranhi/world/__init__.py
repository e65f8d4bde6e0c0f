"""Run ranks from a notebook: a `World` of processes that live as long as the notebook.

Its modules are imported on demand, because helper processes use those that need no torch.
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
