"""Fork the ranks of one machine from one process that has imported what all of them need.

`python -m naranhi.world.fork 4` becomes four ranks. Importing torch costs seconds of CPU; four
ranks importing it separately compete for the cores. Forked ranks wait for one import, and share
the memory of what was imported.

Afterwards this process only waits for its ranks to end, and kills them when the notebook is gone,
because a stopped rank cannot end itself. For each rank the World's folder has its output during
the start (`PID.said`) and, once it has ended, `PID.ended`: its status, and how many processes of
the machine the kernel has killed for lack of memory since the previous rank ended. `launch` reads
both.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from naranhi.distributed import processes
from naranhi.world import engine, leftovers, lifeline, server

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch names its folder there


def main() -> None:
    """Fork the ranks, and end after the last of them. Called once, in a process of its own."""
    folder = Path(os.environ[server.FOLDER])
    # No thread may run yet: a forked child has only the thread that called fork.
    temporary = tempfile.gettempdir()
    before = {*os.listdir(temporary), os.path.basename(os.environ.get(CACHE, ""))}
    gc.disable()  # it takes a fifth of the import time, and finds nothing to collect
    import ipyparallel.engine.app  # noqa: F401
    import torch._dynamo  # an optimizer imports it when constructed, which takes a second
    import torch.distributed  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401  (a second on every rank)

    cache = Path(os.environ.get(CACHE, ""))
    if cache.name not in before:  # Dynamo has just made it, empty; a compilation makes it again
        with suppress(OSError):
            cache.rmdir()
    gc.freeze()  # a collection in a rank would touch every object, and so copy the shared memory
    gc.enable()
    own, ranks = os.getpid(), set()
    for _ in range(int(sys.argv.pop(1))):
        if (pid := os.fork()) == 0:
            _become_rank(folder, own)
            return
        ranks.add(pid)
    ending = threading.Lock()
    lifeline.hold({}, on_end=lambda lost: ending.acquire() and _end(folder, ranks, lost))
    kills = processes.out_of_memory_kills()
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        with suppress(ProcessLookupError):  # whatever the rank has started and left behind
            os.killpg(pid, signal.SIGKILL)
        kills, before = processes.out_of_memory_kills(), kills
        note = folder / f"{pid}.status"
        try:
            note.write_text(f"{os.waitstatus_to_exitcode(status)} {kills - before}")
            note.rename(folder / f"{pid}.ended")
        except FileNotFoundError:  # the World is closed and its folder gone: nobody reads it
            continue
    ending.acquire()  # wait for a thread that is ending all ranks to tidy up
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
    # The forked states would be the same on every rank.
    sys.modules["torch"].default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    engine.main()


if __name__ == "__main__":
    main()
