"""How many bytes a contender holds at most: every allocation and every free of the process.

memray records them all, those of other threads and of C++ too, so tensors, the engines' buffers and
those of the messages are counted alike, to the byte. Blocks below `SMALLEST` are left out: they are
Python's objects, not tensors.
"""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path

from memray import AllocatorType, FileReader, Tracker

SMALLEST = 16 * 2**10  # bytes
FREES = {AllocatorType.FREE, AllocatorType.MUNMAP}
BLOCKS = {
    AllocatorType.MALLOC,
    AllocatorType.CALLOC,
    AllocatorType.REALLOC,
    AllocatorType.POSIX_MEMALIGN,
    AllocatorType.ALIGNED_ALLOC,
    AllocatorType.MEMALIGN,
}


def peak_bytes(make: Callable[[], Callable[[], object]]) -> int:
    """Return the most bytes held at once while what `make()` returns is called twice.

    What `make` has allocated and still holds is counted, what it needed meanwhile is not. Slow: do
    not measure time in this call.
    """
    with tempfile.TemporaryDirectory() as folder:
        made, steps = Path(folder, "made"), Path(folder, "steps")
        with Tracker(made):
            run = make()
            gc.collect()
        with Tracker(steps):
            for _ in range(2):
                run()
                gc.collect()
        held, _ = _replay(made, {})
        _, peak = _replay(steps, held)
    return peak


def _replay(path, held):
    """Return {address: bytes} held at the end, and the most held at once, from `held` on."""
    held = dict(held)
    now = peak = sum(held.values())
    for record in FileReader(path).get_allocation_records():
        kind = AllocatorType(record.allocator)
        if kind in FREES:
            now -= held.pop(record.address, 0)
        elif kind in BLOCKS and record.size >= SMALLEST:
            now += record.size - held.pop(record.address, 0)
            held[record.address] = record.size
            peak = max(peak, now)
    return held, peak
