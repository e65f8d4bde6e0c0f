"""Processes of this machine: where they are, whether they are stopped, and how they are killed."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def namespace():
    """What a process id is unique in: this boot of this machine, as this container sees it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def state(pid):
    """The letter of a process's state as ``ps`` shows it, or None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def is_stopped(pid):
    """Whether a process was stopped, by SIGSTOP or a terminal's Ctrl-Z."""
    return state(pid) == "T"


def is_gone(pid):
    """Whether a process has ended, be it that its parent has not asked how."""
    return state(pid) in (None, "Z", "X")


def environment(pid):
    """The environment that a process of this user was started with; empty when it is gone."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def kill(pid):
    """Kill a process, and its group if it leads one; one that is stopped as well."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def die_with_parent(parent):
    """Have the kernel kill this process when the process ``parent``, its parent, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
