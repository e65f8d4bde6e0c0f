"""What a World leaves to be tidied up when its notebook is gone: the folder, and stopped processes.

The controller and the process that has started the ranks do so both, for either may be stopped.
"""

import os
import shutil
import time
from pathlib import Path

from naranhi.distributed import processes
from naranhi.world import server

PIDS = "pids"  # the file of the folder with the process ids of these two


def tidy_up(folder):
    """Kill those of the two that are stopped, which cannot see that the notebook is gone."""
    pids = Path(folder, PIDS)
    for pid in map(int, pids.read_text().split() if pids.exists() else ()):
        ours = processes.environment(pid).get(server.FOLDER) == str(folder)
        if ours and pid != os.getpid() and processes.is_stopped(pid):
            processes.kill(pid)
    remove(folder)


def remove(folder):
    """Remove the World's folder; again where meanwhile the ranks' parent has left a note in it."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.01)
