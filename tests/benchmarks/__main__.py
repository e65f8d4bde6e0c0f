"""`python -m tests.benchmarks`: print the table and write `_build/bench.json`.

Words given as arguments choose the works whose names contain one of them. `--quick` measures each
with the fewest repetitions only; `--into FILE` writes there. Rows are written as each work ends. On
a terminal a line says which work is being measured. What engines print meanwhile is in a log beside
the file.
"""

import argparse
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks import harness

OUTPUT = Path(__file__).parents[2] / "_build/bench.json"


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("words", nargs="*", help="of works' names; without, all of them")
    parser.add_argument("--quick", action="store_true", help="the fewest repetitions")
    parser.add_argument("--into", type=Path, default=OUTPUT, help="the file of the rows")
    options = parser.parse_args()
    words, log = options.words, options.into.with_suffix(".engines.log")
    works = [
        work for work in harness.found() if not words or any(word in work.name for word in words)
    ]
    if not works:
        sys.exit(f"no work's name contains one of {words}")
    progress = Progress()
    start = time.monotonic()
    with printed_to(log):  # by file descriptor, which the ranks inherit
        rows = harness.measured(
            works,
            report=progress.show,
            seconds=0.0 if options.quick else harness.SECONDS,
            ended=lambda rows: harness.write(rows, options.into),
        )
    progress.show("")
    print(harness.table(rows))
    seconds = time.monotonic() - start
    print(f"\n{harness.REPEATS} to {harness.MOST} repetitions in turn, {seconds:.0f} s in all.")
    print("limit: what no contender can avoid, see each bench_*.py; to best peer: of the medians.")
    print(f"Written to {options.into}; what the engines printed, to {log}")


class Progress:
    """One line on the terminal that is written over; nothing where there is no terminal."""

    def __init__(self):
        self.terminal = os.fdopen(os.dup(2), "w") if os.isatty(2) else None

    def show(self, text):
        if self.terminal:
            self.terminal.write(f"\r\033[K{text}")
            self.terminal.flush()


@contextmanager
def printed_to(path):
    """Send this process's stdout and stderr, and its children's, to a file for a while."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    try:
        with path.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, own in enumerate(before, 1):
            os.dup2(own, descriptor)
            os.close(own)


if __name__ == "__main__":
    main()
