"""Run ranks from a notebook: a `World` of processes that live as long as the notebook.

Its modules are imported on demand, because helper processes need only those without torch.
"""

import importlib
from typing import Any

# Full module names, so that `book/execution.py` finds the files that a chapter depends on.
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
