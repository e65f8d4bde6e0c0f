"""The log of a training: a file with a JSON object for each step, a line each."""

import json
import os
import sys


class Log:
    """`log.write(step=0, loss=6.2)` adds a line. Whatever happens, each line in the file is whole.

    A line is written at once and by one system call, so that nothing is lost with the process.
    When the disk is full, the file ends with the last line that has room. That is told on stderr,
    and later lines are dropped: a training is worth more than its log.

    path: replaced if it exists; None for a log that is written nowhere.
    Raises OSError when the file cannot be opened. ValueError for a number that JSON does not know.
    """

    def __init__(self, path):
        self.path, self.size = path, 0
        self.file = (
            None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        )

    def write(self, **entries):
        """Add a line."""
        if self.file is None:
            return
        line = (json.dumps(entries, allow_nan=False) + "\n").encode()
        try:
            written = os.write(self.file, line)
            if written == len(line):
                self.size += written
                return
            os.ftruncate(self.file, self.size)  # what there was room for is no whole line
            why = "no room for a whole line"
        except OSError as error:
            why = error.strerror
        print(
            f"the log {self.path} ends here ({why}); the training goes on",
            file=sys.stderr,
            flush=True,
        )
        self.close()

    def close(self):
        """No line will follow."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
