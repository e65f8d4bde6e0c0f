"""What this machine is, and how fast its parts are.

The first half reads what Linux and torch say of it; the second measures. Units, everywhere: bytes,
seconds, bytes per second, FLOPs per second, 1 GB being 10**9 bytes. A FLOP is one addition or one
multiplication.

A rate is that of the *best* repetition. Whatever disturbs a measurement only makes it slower, so
the best comes nearest to what the hardware can do (a time to expect is another thing: for that,
take the median). Source: McCalpin, "Memory bandwidth and machine balance in current high
performance computers" (1995), whose STREAM benchmark counts a copy as we do: every byte twice,
once read and once written.
"""

import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from naranhi.measure import timing
from naranhi.measure.timing import CPU, best_seconds

ROOT = Path("/")


class Part(NamedTuple):
    """A kind of part: how many there are, what each holds (bytes) or carries (bytes a second)."""

    name: str
    count: int
    bytes: int | None = None
    bandwidth: float | None = None  # one way, as the machine declares it
    detail: str = ""


def parts(root: Path = ROOT) -> list[Part]:
    """What computes, remembers and connects here, the nearest first.

    `root` is where /proc and /sys are found. A part that the system does not tell of is missing.
    """
    cores = Part("core", len(os.sched_getaffinity(0)), detail=_cpu_model(root))
    memory = re.search(r"^MemTotal:\s*(\d+) kB", Path(root, "proc/meminfo").read_text(), re.M)
    memory = Part("memory", 1, int(memory[1]) * 1024)
    return [cores, *caches(root=root), memory, *gpus(), *rdma_ports(root)]


def _cpu_model(root):
    named = re.search(r"^model name\s*:\s*(.+)$", Path(root, "proc/cpuinfo").read_text(), re.M)
    return named[1].strip() if named else platform.machine()


def caches(device=CPU, root: Path = ROOT) -> list[Part]:
    """The data caches of a device, the nearest first; none where a virtual machine hides them.

    Of a GPU torch knows only the L2 cache, which all of its multiprocessors share.
    """
    if torch.device(device).type == "cuda":
        return [Part("GPU's L2 cache", 1, torch.cuda.get_device_properties(device).L2_cache_size)]
    kinds = {}
    for size in Path(root, "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*/size"):
        level, kind, cores, text = (
            (size.parent / name).read_text().strip()
            for name in ("level", "type", "shared_cpu_list", "size")
        )
        if kind != "Instruction":
            bytes = int(text.removesuffix("K")) * 1024
            # Cores that share a cache all list it.
            kinds.setdefault((int(level), bytes), set()).add(cores)
    return [
        Part(f"L{level} cache", len(kinds[level, bytes]), bytes) for level, bytes in sorted(kinds)
    ]


def gpus() -> list[Part]:
    """The GPUs that this process sees, by kind: their L2 caches and their memories."""
    each = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    kinds = Counter((gpu.name, gpu.L2_cache_size, gpu.total_memory) for gpu in each)
    found = []
    for (name, cache, memory), count in kinds.items():
        found.append(Part("GPU's L2 cache", count, cache))
        found.append(Part("GPU's memory", count, memory, detail=name))
    return found


def rdma_ports(root: Path = ROOT) -> list[Part]:
    """The network ports that can do RDMA, with their bandwidth one way; none on most machines."""
    found = []
    for rate in sorted(Path(root, "sys/class/infiniband").glob("*/ports/*/rate")):
        gigabits = float(rate.read_text().split()[0])  # "400 Gb/sec (4X NDR)"
        layer = (rate.parent / "link_layer").read_text().strip()  # "InfiniBand" or "Ethernet"
        found.append(Part(f"{layer} port", 1, None, gigabits * 1e9 / 8, rate.parts[-4]))
    return found


def topology() -> str | None:
    """How the GPUs are wired to each other: what `nvidia-smi topo -m` prints; None without GPUs."""
    if not torch.cuda.device_count() or not shutil.which("nvidia-smi"):
        return None
    done = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False
    )
    # Where it cannot tell (under WSL, say), what it answers instead is the answer.
    text = done.stdout or done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", text).expandtabs().rstrip()


def copy_seconds(sizes: list[int], device=CPU) -> dict[int, float]:
    """Seconds of copying a tensor within a device's memory, by its size in bytes."""
    source = torch.ones(max(sizes), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copying(size):
        here, there = source[:size], target[:size]
        return lambda: there.copy_(here)

    return best_seconds({size: copying(size) for size in sizes}, device)


def product_seconds(
    rows: list[int], inner: int, columns: int, device=CPU, dtype=torch.float32
) -> dict[int, float]:
    """Seconds of a matrix product, (rows, inner) times (inner, columns), by its number of rows.

    That is 2 * rows * inner * columns FLOPs.
    """
    weights = torch.randn(inner, columns, device=device, dtype=dtype)

    def multiplying(count):
        x = torch.randn(count, inner, device=device, dtype=dtype)
        y = torch.empty(count, columns, device=device, dtype=dtype)
        return lambda: torch.mm(x, weights, out=y)

    return best_seconds({count: multiplying(count) for count in rows}, device)


def link_seconds(sizes: list[int], device=CPU, group=None, repeats=20) -> dict[int, float]:
    """Seconds of one message from rank 0 to rank 1, by its size in bytes: half of a round trip.

    Call it on every rank of `group` (None: the default group); all return the same numbers. There
    and back is timed, since only then are both ends of the time read from one clock.
    Raises ValueError for a group of fewer than two ranks, and for a size below 1.
    """
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if dist.get_world_size(group) < 2:
        raise ValueError("a link has two ends, and this group has one rank")
    if min(sizes) < 1:
        raise ValueError("a message has at least one byte")
    buffer = torch.ones(max(sizes), dtype=torch.uint8, device=device)

    def there_and_back(message):
        if rank == 0:
            dist.send(message, group=group, group_dst=1)
            dist.recv(message, group=group, group_src=1)
        elif rank == 1:
            dist.recv(message, group=group, group_src=0)
            dist.send(message, group=group, group_dst=0)

    trips = {size: lambda size=size: there_and_back(buffer[:size]) for size in sizes}
    times = timing.interleaved(trips, repeats=repeats, group=group)
    return {size: min(seconds) / 2 for size, seconds in times.items()}
