"""How many bytes a run holds at most, beyond what was held before it: as the kernel counts them.

Nothing that runs is changed or watched, so engines that allocate in threads of their own, or in
C++, are counted too. Linux with glibc only.
"""

import ctypes
import gc
import re
from pathlib import Path

M_MMAP_THRESHOLD = -3  # from malloc.h


def peak_bytes(run) -> int:
    """The largest resident memory while `run()` runs, less that before it. OSError if not Linux.

    From the first call on, every block of 64 KiB or more is given back to the system as soon as it
    is freed, which makes allocations slow: do not measure time in a process that has called this.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 65536)
    run()  # what a first run makes and keeps is no part of the second
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # begins the count of VmHWM anew: man 5 proc
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field):
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
