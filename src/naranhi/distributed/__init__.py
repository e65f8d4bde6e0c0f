"""Process groups: join them, arrange them as a mesh, compare values across their ranks.

Names are imported on first use, because helper processes use modules of this package that do not
need torch.
"""

import importlib
from typing import Any

# In full, so that `book/execution.py` finds what a chapter depends on.
_HOME = {
    "Mesh": "naranhi.distributed.mesh",
    "agree": "naranhi.distributed.agreement",
    "backend_for": "naranhi.distributed.backends",
    "device_of": "naranhi.distributed.backends",
    "fingerprint": "naranhi.distributed.agreement",
    "from_all_ranks": "naranhi.distributed.agreement",
    "join": "naranhi.distributed.launch",
    "raise_on_all": "naranhi.distributed.agreement",
}
__all__ = [
    "Mesh",
    "agree",
    "backend_for",
    "device_of",
    "fingerprint",
    "from_all_ranks",
    "join",
    "raise_on_all",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
