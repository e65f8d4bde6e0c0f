"""Run ranks from a notebook: a `World` of processes that live as long as the notebook.

Its modules are imported on demand, because helper processes use those that need no torch.
"""

import importlib
from typing import Any

# In full, so that `book/execution.py` finds what a chapter depends on.
_HOME = {
    "RankError": "naranhi.world.errors",
    "RankInterrupt": "naranhi.world.errors",
    "World": "naranhi.world.world",
}
__all__ = ["RankError", "RankInterrupt", "World"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
