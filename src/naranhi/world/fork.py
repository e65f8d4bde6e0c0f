"""The ranks of one machine, forked from one process that has imported what all of them need.

``python -m naranhi.world.fork 4`` becomes four ranks. To import torch keeps a core busy for
seconds. Four ranks that do so by themselves wait for it as long as their cores take for all four;
forked, they wait for one, and share the memory of what was imported.

Beside its ranks this process only waits for their ends, and ends them when the notebook is gone: a
rank that is stopped cannot do so by itself. Of each rank the World's folder has what it says while
it starts (``PID.said``) and, when it has ended, its status (``PID.ended``), both read by `launch`.
"""

import os
import sys
import threading
from pathlib import Path

from naranhi.distributed import processes
from naranhi.world import engine, leftovers, lifeline, server


def main():
    """Fork the ranks, and end after the last. Called once, in a process of its own."""
    folder = Path(os.environ[server.FOLDER])
    # No thread may run yet: a fork has only the thread that called it.
    import ipyparallel.engine.app  # noqa: F401
    import torch.distributed  # noqa: F401

    own, ranks = os.getpid(), set()
    for _ in range(int(sys.argv.pop(1))):
        if (pid := os.fork()) == 0:
            _become_rank(folder, own)
            return
        ranks.add(pid)
    ending = threading.Lock()
    lifeline.hold({}, on_end=lambda lost: ending.acquire() and _end(folder, ranks, lost))
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        note = folder / f"{pid}.status"
        try:
            note.write_text(str(os.waitstatus_to_exitcode(status)))
            note.rename(folder / f"{pid}.ended")
        except FileNotFoundError:  # the World is closed, and its folder gone: nobody asks
            continue
    ending.acquire()  # else the thread that ends all has not yet tidied up
    os._exit(0)


def _end(folder, ranks, lost):
    for pid in list(ranks):
        processes.kill(pid)
    if lost:
        leftovers.tidy_up(folder)


def _become_rank(folder, parent):
    processes.die_with_parent(parent)
    said = os.open(folder / f"{os.getpid()}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.close(said)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # what was forked would be the same on every rank
    engine.main()


if __name__ == "__main__":
    main()
