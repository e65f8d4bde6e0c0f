"""The log of a training: a file with one JSON object per step, each on its own line."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Self


class Log:
    """A log file: `log.write(step=0, loss=6.2)` adds a line, and every line in the file is whole.

    Each line is written immediately, by one system call, so nothing is lost if the process dies. If
    the disk is full, the file ends with the last line that fits. A message on stderr says so, and
    later lines are dropped: a training is worth more than its log.

    Args:
        path: the file, replaced if it exists; None for a log that is not written.

    Raises:
        OSError: the file cannot be opened.
        ValueError: a value is infinite or NaN, which JSON does not have; raised by `write`.
    """

    path: str | os.PathLike[str] | None
    size: int

    def __init__(self, path: str | os.PathLike[str] | None):
        self.path, self.size = path, 0
        self.file = (
            None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        )

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
        print(
            f"the log {self.path} ends here ({why}); the training goes on",
            file=sys.stderr,
            flush=True,
        )
        self.close()

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
