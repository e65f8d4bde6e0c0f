"""Process groups: joined, laid out as a mesh, agreed over.

Imported on demand: helper processes use parts of it that need no torch.
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
