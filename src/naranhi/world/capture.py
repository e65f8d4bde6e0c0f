"""What a rank prints, whoever prints it: Python, a library's C++, a child process, a late thread.

Descriptors 1 and 2 of a rank lead to two files for as long as the rank lives. After each cell the
notebook is given what they have grown by; what comes after a cell is shown below the next one. Of a
rank that died the notebook reads the files itself (`last_words`, `unseen`).
"""

import contextlib
import ctypes
import io
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

LIMIT = 1 << 20  # bytes that a file may hold of what has been shown
SUFFIXES = {1: "out", 2: "err"}

# What C++ prints of an exception that nobody caught, less the place in gloo's sources.
LAST_WORDS = re.compile(r"what\(\):\s*(?:\[enforce fail at [^]]*\]\s*)?(.*)")
_files = {}  # 1 or 2 -> the descriptor that the rank's file is kept by
_shown = {1: 0, 2: 0}  # bytes of the file that the notebook has


def start(folder):
    """Lead descriptors 1 and 2 to files: the notebook's, or unnamed ones where it is elsewhere."""
    # Before the first cell the engine's own log goes where the launcher has put it.
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
    """``sys.stdout`` or ``sys.stderr`` of a rank: each line goes to its descriptor at once."""

    def __init__(self, descriptor):
        file = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
        super().__init__(file, "utf-8", "backslashreplace", line_buffering=True)


def repair():
    """Put back the streams and descriptors that the last cell has closed or replaced."""
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
    except OSError:  # the disk is full, and it would fail again with the same text
        return False
    return stream.fileno() == descriptor


def take():
    """What has been printed since the last time: a pair of texts, stdout and stderr."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        with contextlib.suppress(Exception):  # a cell may have put anything in its place
            getattr(sys, name).flush()
    ctypes.CDLL(None).fflush(None)  # what C and C++ keep until there is more
    return tuple(_grown(descriptor) for descriptor in SUFFIXES)


def _grown(descriptor):
    file, parts = _files[descriptor], []
    while part := os.pread(file, 1 << 20, _shown[descriptor]):
        parts.append(part)
        _shown[descriptor] += len(part)
    if _shown[descriptor] > LIMIT and os.fstat(file).st_size == _shown[descriptor]:
        os.ftruncate(file, 0)
        _shown[descriptor] = 0
    return b"".join(parts).decode(errors="replace")


def shown():
    """How many bytes of its files the notebook has: a pair."""
    return tuple(_shown.values())


def unseen(folder, host, pid, shown):
    """What a rank that died had printed since the notebook last had its output: a pair of texts."""
    texts = []
    for suffix, position in zip(SUFFIXES.values(), shown, strict=True):
        file = _path(folder, host, pid, suffix)
        texts.append(file.read_bytes()[position:].decode(errors="replace") if file.exists() else "")
    return tuple(texts)


def _path(folder, host, pid, suffix):
    return Path(folder, f"{host}-{pid}.{suffix}")


def last_words(text):
    """The exception that ended a process, from what it had printed, or None."""
    words = LAST_WORDS.findall(text)
    return words[-1] if words else None
