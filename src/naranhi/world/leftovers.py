"""Clean up after a notebook that is gone: the World's folder, and stopped processes.

The controller and the parent of the ranks both do it, because either of them may be stopped.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from naranhi.distributed import processes
from naranhi.world import requirements, server

PIDS = "pids"  # the file in the folder with the process ids of these two


def tidy_up(folder: str | Path) -> None:
    """Kill the controller and the ranks' parent if they are stopped, and remove the World's folder.

    A stopped process cannot notice by itself that the notebook is gone.
    """
    try:
        pids = Path(folder, PIDS).read_text()
    except FileNotFoundError:  # the other process was quicker
        pids = ""
    for pid in map(int, pids.split()):
        ours = processes.environment(pid).get(server.FOLDER) == str(folder)
        if ours and pid != os.getpid() and processes.is_stopped(pid):
            processes.kill(pid)
    remove(folder)


def folder_elsewhere(folder: str | Path) -> Callable[[bool], None] | None:
    """Make a folder for this process's engine if the World's folder is not on this host.

    Without a folder ipyparallel's engine would not start.

    Args:
        folder: the World's folder.

    Returns:
        A function that removes it, for `lifeline.hold`; None if the World's folder is here.
    """
    if os.path.isdir(folder):
        return None
    own = os.environ["IPYTHONDIR"] = os.environ["IPP_PROFILE_DIR"] = requirements.folder()
    return lambda lost: remove(own)


def remove(folder: str | Path) -> None:
    """Remove the World's folder; retry if the ranks' parent writes a file into it meanwhile."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.01)
