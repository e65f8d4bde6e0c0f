"""The log of a training: a file with one JSON object per step, each on its own line."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any, Self


class Log:
    """A log file: `log.write(step=0, loss=6.2)` adds a line, and every line in the file is whole.

    Each line is written immediately, by one system call, so nothing is lost if the process dies. If
    the disk is full, the file ends with the last line that fits. A message on stderr says so, and
    later lines are dropped: a training is worth more than its log. On NFS a full disk may show only
    when the file is closed; the message then says that the end of the log may be missing.

    Args:
        path: the file, replaced if it exists; None for a log that is not written.
        start: the step of the next line; the lines of earlier steps stay, for a resumed training.

    Raises:
        OSError: the file cannot be opened.
        ValueError: a value is infinite or NaN, which JSON does not have; raised by `write`.
    """

    path: str | os.PathLike[str] | None
    size: int
    file: int | None

    def __init__(self, path: str | os.PathLike[str] | None, start: int = 0):
        self.path, self.size, self.file = path, 0, None
        if path is not None:
            if start and Path(path).is_file():
                self.size = _size_before(Path(path), start)
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            if stat.S_ISREG(os.fstat(self.file).st_mode):
                os.ftruncate(self.file, self.size)
                os.lseek(self.file, 0, os.SEEK_END)  # a pipe cannot seek

    def write(self, **entries: Any) -> None:
        """Add a line."""
        if self.file is None:
            return
        line = (json.dumps(entries, allow_nan=False) + "\n").encode()
        try:
            written = os.write(self.file, line)
            if written == len(line):
                self.size += written
                return
            os.ftruncate(self.file, self.size)  # remove the part of the line that fitted
            why = "no room for a whole line"
        except OSError as error:
            why = error.strerror
        self._give_up(f"ends here ({why})")
        self.close()

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        if self.file is None:
            return
        file, self.file = self.file, None  # closed even if that fails
        try:
            os.close(file)
        except OSError as error:
            self._give_up(f"may lack its last lines ({error.strerror})")

    def _give_up(self, what):
        print(f"the log {self.path} {what}; the training goes on", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _size_before(path, start):
    """Return the size in bytes of the leading lines that are whole and of steps before `start`."""
    size = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            is_before = json.loads(line)["step"] < start
        except (ValueError, KeyError, TypeError):
            is_before = False  # not a line of a log, or not a whole one
        if not (is_before and line.endswith(b"\n")):
            break
        size += len(line)
    return size
