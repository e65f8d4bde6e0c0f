"""Wait for, list, write and digest the files of a checkpoint."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any, TextIO

# Seconds. On a network file system, files that one node makes or renames appear later on others.
APPEARS = 5.0


def wait_for(path: Path) -> None:
    """Wait until a file or folder is there, for at most `APPEARS` seconds.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be accessed.
    """
    end = time.monotonic() + APPEARS
    while True:
        try:
            path.stat()
            return
        except FileNotFoundError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def is_there(path: Path) -> bool:
    """Return whether a file or folder is there.

    Raises:
        OSError: that is unknown, because the path cannot be accessed.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def open_no_link(path: Path) -> TextIO:
    """Open a text file for appending and reading; create it if it does not exist.

    Raises:
        OSError: it is a symbolic link, which may lead to anything.
    """

    def opener(name, flags):
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, "a+", errors="replace", opener=opener)


def entries(folder: Path) -> list[Path]:
    """Return the paths in a folder; none if it does not exist yet."""
    try:
        return [*folder.iterdir()]
    except FileNotFoundError:
        return []


def digests(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    """Return {name: size and digest} of the files whose names match a glob pattern."""
    return {path.name: digest_of(path) for path in sorted(folder.glob(pattern))}


def digest_of(path: Path) -> dict[str, Any]:
    """Return the size of a file, in bytes, and its SHA-256."""
    with path.open("rb") as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def write(path: Path, data: bytes) -> None:
    """Write a file, and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
