"""Delete checkpoints, and the leftovers of killed saves, from the folder of a run."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path


def remove(path: Path) -> None:
    """Delete a committed checkpoint; rename it first, so that no partial one has its name."""
    if path.is_symlink():  # to a checkpoint of another run, which stays
        path.unlink()
        return
    doomed = path.with_name(path.name + ".deleting")  # a name that nobody gives by hand
    if os.path.lexists(doomed):
        delete(doomed)
    path.rename(doomed)
    delete(doomed)


def delete(path: Path) -> None:
    """Delete a folder with its contents, or a file or symbolic link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def or_warn(function: Callable[[Path], None], path: Path) -> None:
    """Delete something by `function(path)`; warn if that fails, because no run depends on it."""
    try:
        function(path)
    except OSError as error:
        warnings.warn(
            f"{path} cannot be deleted ({error.strerror}): the run goes on; delete this path by "
            "hand",
            stacklevel=2,
        )
