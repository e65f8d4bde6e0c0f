"""Capture all output of a rank: Python, a library's C++, a child process, a thread of an old cell.

Descriptors 1 and 2 of a rank lead to two files for as long as the rank lives. After each cell the
rank sends the notebook these files' new content. Output that comes after a cell is shown below
the next cell. If a rank died, the notebook reads the files itself (`last_words`, `unseen`).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

LIMIT = 1 << 20  # bytes of already shown output that a file may hold
SUFFIXES = {1: "out", 2: "err"}
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2  # of Linux's fallocate

# What C++ prints about an uncaught exception, without the location in gloo's sources.
LAST_WORDS = re.compile(r"what\(\):\s*(?:\[enforce fail at [^]]*\]\s*)?(.*)")
_files = {}  # 1 or 2 -> the descriptor that keeps the rank's file open
_shown = {1: 0, 2: 0}  # bytes of each file that the notebook has received
_freed = {1: 0, 2: 0}  # bytes of each file that no longer take room on the disk


def start(folder: str) -> None:
    """Redirect descriptors 1 and 2 to files.

    Args:
        folder: the World's folder, where the files are made. If it does not exist here, because the
            notebook is on another host, unnamed temporary files are used.
    """
    # The engine's own log keeps going to the launcher's file until the first cell.
    sys.stdout, sys.stderr = Stream(os.dup(1)), Stream(os.dup(2))
    for descriptor, suffix in SUFFIXES.items():
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        if os.path.isdir(folder):
            file = os.open(_path(folder, socket.gethostname(), os.getpid(), suffix), flags, 0o600)
        else:
            file, name = tempfile.mkstemp(prefix="naranhi-")
            os.close(file)
            file = os.open(name, flags)
            os.unlink(name)
        _files[descriptor] = file
        os.dup2(file, descriptor)


class Stream(io.TextIOWrapper):
    """Replace `sys.stdout` or `sys.stderr` of a rank: each line goes to its descriptor at once.

    Args:
        descriptor: the file descriptor to write to; it is not closed with the stream.
    """

    def __init__(self, descriptor: int):
        file = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
        super().__init__(file, "utf-8", "backslashreplace", line_buffering=True)


def repair() -> None:
    """Restore the streams and descriptors that the last cell closed or replaced."""
    for descriptor, file in _files.items():
        os.dup2(file, descriptor)
        name = f"std{SUFFIXES[descriptor]}"
        if not _is_whole(getattr(sys, name, None), descriptor):
            setattr(sys, name, Stream(descriptor))


def _is_whole(stream, descriptor):
    if not isinstance(stream, Stream) or stream.closed or not stream.line_buffering:
        return False
    try:
        stream.flush()
    except OSError:  # the disk is full, and a retry would fail with the same text
        return False
    return stream.fileno() == descriptor


def take() -> tuple[str, str]:
    """Return what has been printed since the last call: stdout and stderr, as text."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        with contextlib.suppress(Exception):  # a cell may have replaced it by anything
            getattr(sys, name).flush()
    ctypes.CDLL(None).fflush(None)  # output that C and C++ still buffer
    return tuple(_grown(descriptor) for descriptor in SUFFIXES)


def _grown(descriptor):
    file, parts = _files[descriptor], []
    while part := os.pread(file, 1 << 20, _shown[descriptor]):
        parts.append(part)
        _shown[descriptor] += len(part)
    if parts and not parts[-1].endswith(b"\n"):
        parts += _rest(descriptor)
    if _shown[descriptor] - _freed[descriptor] > LIMIT and _free(file, _shown[descriptor]):
        _freed[descriptor] = _shown[descriptor]
    return b"".join(parts).decode(errors="replace")


def _rest(descriptor):
    """Take the rest of a line that another process or thread may be in the middle of writing.

    A file grows page by page while it is written to, so that its end may be half a write. Whoever
    writes holds the file's lock, and to change the file's mode takes that lock as well.
    """
    file, parts = _files[descriptor], []
    os.fchmod(file, 0o600)
    while part := os.pread(file, 1 << 20, _shown[descriptor]):
        line, end, _ = part.partition(b"\n")
        parts.append(line + end)
        _shown[descriptor] += len(parts[-1])
        if end:
            break
    return parts


def _free(file, size):
    """Give back the room of a file's first bytes, whose places stay; return whether that worked.

    A file that is cut off would lose what another process writes into it at the same time.
    """
    hole = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    return not ctypes.CDLL(None).fallocate(file, hole, ctypes.c_int64(0), ctypes.c_int64(size))


def shown() -> tuple[int, int]:
    """Return how many bytes of its two files the notebook has received."""
    return tuple(_shown.values())


def unseen(folder: str, host: str, pid: int, shown: tuple[int, int]) -> tuple[str, str]:
    """Return what a dead rank printed after the last output that the notebook received.

    Args:
        folder: the World's folder.
        host: the rank's host.
        pid: its process id.
        shown: bytes of stdout and stderr that the notebook has received.

    Returns:
        stdout and stderr, as text.
    """
    texts = []
    for suffix, position in zip(SUFFIXES.values(), shown, strict=True):
        file = _path(folder, host, pid, suffix)
        texts.append("")
        if file.exists():
            with file.open("rb") as opened:
                opened.seek(position)
                texts[-1] = opened.read().decode(errors="replace")
    return tuple(texts)


def _path(folder, host, pid, suffix):
    return Path(folder, f"{host}-{pid}.{suffix}")


def last_words(text: str) -> str | None:
    """Return the message of the exception that ended a process, found in its output, or None."""
    words = LAST_WORDS.findall(text)
    return words[-1] if words else None
