"""Process groups: join them, arrange them as a mesh, compare values across their ranks.

Names are imported on first use, because helper processes use modules of this package that do not
need torch.
"""

import importlib

_HOME = {
    "Mesh": "mesh",
    "fingerprint": "agreement",
    "join": "launch",
    "agree": "agreement",
}
__all__ = ["Mesh", "agree", "fingerprint", "join"]


def __getattr__(name):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
