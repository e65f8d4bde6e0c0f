"""The hardware of this machine, and how fast its parts are.

The first half reads what Linux and torch report; the second half measures. Units, everywhere:
bytes, seconds, bytes per second, FLOPs per second; 1 GB is 10**9 bytes. A FLOP is one addition or
one multiplication.

A rate is that of the *best* repetition. A disturbance can only make a measurement slower, so the
best repetition comes closest to what the hardware can do. (To learn what time to expect, take the
median.)

Source: McCalpin, "Memory bandwidth and machine balance in current high performance computers"
(1995), whose STREAM benchmark counts a copy as we do: every byte twice, once read and once written.
"""

from __future__ import annotations

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
    """A kind of part: how many there are, and how much each stores (bytes) or carries (bytes/s)."""

    name: str
    count: int
    bytes: int | None = None
    bandwidth: float | None = None  # in one direction, as the machine reports it
    detail: str = ""


def parts(root: Path = ROOT) -> list[Part]:
    """Return the parts of this machine that compute, store and connect, the nearest first.

    A part that the system does not report is missing. Only cores on which this process may run
    count, and a core with two hardware threads counts once.

    Args:
        root: the folder that contains /proc and /sys.
    """
    cores = {_core(cpu, root) for cpu in os.sched_getaffinity(0)}
    cores = Part("core", len(cores), detail=_cpu_model(root))
    memory = re.search(r"^MemTotal:\s*(\d+) kB", Path(root, "proc/meminfo").read_text(), re.M)
    memory = Part("memory", 1, int(memory[1]) * 1024)
    return [cores, *caches(root=root), memory, *gpus(), *rdma_ports(root)]


def _core(cpu, root):
    """Return a key that all hardware threads of one core share."""
    siblings = Path(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return siblings.read_text() if siblings.exists() else cpu


def _cpu_model(root):
    named = re.search(r"^model name\s*:\s*(.+)$", Path(root, "proc/cpuinfo").read_text(), re.M)
    return named[1].strip() if named else platform.machine()


def caches(device: torch.device | str = CPU, root: Path = ROOT) -> list[Part]:
    """Return the data caches of a device, the nearest first; none if a virtual machine hides them.

    For a GPU torch reports only the L2 cache, which all its multiprocessors share.

    Args:
        device: the CPU or a GPU.
        root: the folder that contains /sys.
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
            # All cores that share a cache list it, so a set counts it once.
            kinds.setdefault((int(level), bytes), set()).add(cores)
    return [
        Part(f"L{level} cache", len(kinds[level, bytes]), bytes) for level, bytes in sorted(kinds)
    ]


def gpus() -> list[Part]:
    """Return the GPUs that this process sees, by kind: their L2 caches and their memories."""
    each = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    kinds = Counter((gpu.name, gpu.L2_cache_size, gpu.total_memory) for gpu in each)
    caches = []
    for (name, cache, memory), count in kinds.items():
        caches.append(Part("GPU's L2 cache", count, cache))
        caches.append(Part("GPU's memory", count, memory, detail=name))
    return caches


def rdma_ports(root: Path = ROOT) -> list[Part]:
    """Return the network ports that support RDMA, with their bandwidth in one direction.

    Most machines have none.

    Args:
        root: the folder that contains /sys.
    """
    links = []
    for rate in sorted(Path(root, "sys/class/infiniband").glob("*/ports/*/rate")):
        gigabits = float(rate.read_text().split()[0])  # "400 Gb/sec (4X NDR)"
        layer = (rate.parent / "link_layer").read_text().strip()  # "InfiniBand" or "Ethernet"
        links.append(Part(f"{layer} port", 1, None, gigabits * 1e9 / 8, rate.parts[-4]))
    return links


def topology() -> str | None:
    """Return how the GPUs are connected, as `nvidia-smi topo -m` prints it; None without GPUs."""
    if not torch.cuda.device_count() or not shutil.which("nvidia-smi"):
        return None
    done = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False
    )
    # Where it cannot report the topology (under WSL, say), return its message instead.
    text = done.stdout or done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", text).expandtabs().rstrip()


def copy_seconds(sizes: list[int], device: torch.device | str = CPU) -> dict[int, float]:
    """Return the seconds to copy a tensor within a device's memory, by its size in bytes."""
    source = torch.ones(max(sizes), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copying(size):
        start, end = source[:size], target[:size]
        return lambda: end.copy_(start)

    return best_seconds({size: copying(size) for size in sizes}, device)


def product_seconds(
    rows: list[int],
    inner: int,
    columns: int,
    device: torch.device | str = CPU,
    dtype: torch.dtype = torch.float32,
) -> dict[int, float]:
    """Return the seconds of a product, (rows, inner) by (inner, columns), by its number of rows.

    A product is 2 * rows * inner * columns FLOPs.

    Args:
        rows: the numbers of rows to measure.
        inner: the number of columns of the first factor, and of rows of the second.
        columns: the number of columns of the second factor.
        device: where to multiply.
        dtype: the dtype of both factors and of the product.
    """
    weights = torch.randn(inner, columns, device=device, dtype=dtype)

    def multiplying(count):
        x = torch.randn(count, inner, device=device, dtype=dtype)
        y = torch.empty(count, columns, device=device, dtype=dtype)
        return lambda: torch.mm(x, weights, out=y)

    return best_seconds({count: multiplying(count) for count in rows}, device)


def link_seconds(
    sizes: list[int],
    device: torch.device | str = CPU,
    group: dist.ProcessGroup | None = None,
    repeats: int = 20,
) -> dict[int, float]:
    """Return the seconds of one message from rank 0 to rank 1, by its size: half of a round trip.

    Call this on every rank of `group`; all ranks return the same values. A round trip is timed,
    because only then are its start and its end read from one clock.

    Args:
        sizes: the sizes of the messages in bytes.
        device: where the messages are stored.
        group: the ranks; None is the default group.
        repeats: the number of repetitions.

    Raises:
        ValueError: the group has fewer than two ranks, or a size is below 1.
    """
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if dist.get_world_size(group) < 2:
        raise ValueError("measuring a link needs 2 ranks or more, and this group has 1")
    if min(sizes) < 1:
        raise ValueError(f"sizes must be at least 1 byte, not {min(sizes)}")
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
