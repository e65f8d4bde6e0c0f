"""Processes of this machine: their namespace, their state, and how to kill them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def namespace() -> str:
    """Return the scope in which a process id is unique: this boot, seen from this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def state(pid: int) -> str | None:
    """Return the letter of a process's state as `ps` shows it, or None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped, by SIGSTOP or by Ctrl-Z in a terminal."""
    return state(pid) == "T"


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not waited for it yet."""
    return state(pid) in (None, "Z", "X")


def out_of_memory_kills() -> int:
    """Return how many processes of this machine the kernel has killed for lack of memory."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counters.get("oom_kill", 0))


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process of this user started with; empty if it is gone."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def kill(pid: int) -> None:
    """Kill a process, and its process group if it leads one, even if it is stopped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """Make the operating system kill this process when its parent, the process `parent`, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request
        os.kill(os.getpid(), signal.SIGKILL)
