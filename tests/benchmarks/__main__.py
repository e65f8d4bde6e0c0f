"""`python -m tests.benchmarks`: print the table and write `_build/bench.json`.

Words given as arguments choose the works whose names contain one of them.
"""

import sys
import time
from pathlib import Path

from tests.benchmarks import harness

OUTPUT = Path(__file__).parents[2] / "_build" / "bench.json"


def main():
    words = sys.argv[1:]
    works = [
        work for work in harness.found() if not words or any(word in work.name for word in words)
    ]
    if not works:
        sys.exit(f"no work's name contains one of {words}")
    start = time.monotonic()
    rows = harness.measured(
        works, report=lambda text: print(text, flush=True), seconds=harness.SECONDS
    )
    harness.write(rows, OUTPUT)
    print(f"\n{harness.table(rows)}\n")
    seconds = time.monotonic() - start
    print(f"{harness.REPEATS} to {harness.MOST} repetitions in turn, {seconds:.0f} s in all.")
    print("limit: what no contender can avoid, see each bench_*.py; to best peer: of the medians.")
    print(f"Written to {OUTPUT}")


if __name__ == "__main__":
    main()
