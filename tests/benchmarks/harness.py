"""The harness: works measured on real ranks, contenders in turn, the limit measured beside them.

A work is a name, a number of ranks and a function that every rank calls to be given its contenders.
A module of this folder named `bench_*.py` has a function `works()` that returns a list of them;
nothing else needs to know it.
"""

import copy
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from naranhi import measure
from tests.benchmarks.memory import peak_bytes
from tests.support.gloo_ranks import Ranks

OURS = "naranhi"  # how a contender of ours begins; all others are peers
REPEATS, MOST = 20, 200
SECONDS = 6.0  # of a work: of what is short, a median of the fewest repetitions says little


@dataclass
class Contenders:
    """What one rank measures. Each of `make` prepares a contender and returns its run; a run
    returns its result, a tensor or a list of them, or a function that gives it, for which no time
    is counted; and `limit` anything.

    `limit` does only what no contender can avoid, and its time, times `limit_scale`, is the limit.
    `tolerance` is the largest difference allowed between any result and the first one's.
    """

    make: dict[str, Callable[[], Callable[[], object]]]
    limit: Callable[[], object]
    tolerance: float = 0.0
    limit_scale: float = 1.0


@dataclass
class Work:
    """`contenders(group, *args)`, a function of a module's top level, gives a rank's Contenders.

    With `memory`, what each contender holds at most is measured too, in new processes.
    """

    name: str
    ranks: int
    contenders: Callable[..., Contenders]
    args: tuple = field(default=())
    memory: bool = False


def found() -> list[Work]:
    """The works of every `bench_*.py` of this folder, by number of ranks: starting them is slow."""
    works = []
    for path in sorted(Path(__file__).parent.glob("bench_*.py")):
        works += importlib.import_module(f"tests.benchmarks.{path.stem}").works()
    return sorted(works, key=lambda work: work.ranks)


def measured(
    works, repeats=REPEATS, report=lambda text: None, seconds=0.0, ended=lambda rows: None
) -> list[dict]:
    """Measure the works: a row for each contender, times in seconds.

    Each work is repeated at least `repeats` times, and for about `seconds`, but not over MOST.
    median_s and min_s are over these `repetitions`, limit_s is the median of the limit, measured in
    the same turns, and ratio_to_best_peer is median_s over the smallest median of the peers. A work
    with `memory` has peak_bytes, too: the most that a contender holds on any rank. `ended` is
    called with all rows so far when a work has ended. Raises AssertionError when two contenders of
    a work do not give the same result.
    """
    rows, world, kind = [], None, ""
    try:
        for index, work in enumerate(works, 1):
            module = work.contenders.__module__
            # A kind of work in new processes: after DeepSpeed's pipelines its ZeRO does not start.
            if world is None or (world.ranks, kind) != (work.ranks, module):
                if world:
                    world.close()
                world, kind = Ranks(work.ranks, deadline=120.0), module
            report(f"[{index}/{len(works)}] {work.name}")
            times = world.call(on_a_rank, work, repeats, seconds)[0]
            rows += _rows(work.name, times)
            if work.memory:
                for row in rows[-len(times) :]:
                    world.close()  # a process for each: what others have left cannot disturb
                    row["peak_bytes"] = max(world.call(memory_on_a_rank, work, row["contender"]))
                world.close()
            ended(rows)
    finally:
        if world:
            world.close()
    return rows


def on_a_rank(work, repeats, seconds=0.0):
    """{contender: seconds of each repetition}, and the limit's under None."""
    with measure.unchecked_group() as group:
        contenders = work.contenders(group, *work.args)
        made = {name: make() for name, make in contenders.make.items()}
        results = {name: copy.deepcopy(result(run)) for name, run in made.items()}
        first = next(iter(results))
        for name, found in results.items():
            torch.testing.assert_close(
                found,
                results[first],
                rtol=0.0,
                atol=contenders.tolerance,
                msg=lambda text, name=name: f"{work.name}: {name} is not {first}\n{text}",
            )
        runs = {**made, None: contenders.limit}
        turn = sum(time for (time,) in measure.interleaved(runs, repeats=1, group=group).values())
        repeats = max(repeats, min(MOST, int(seconds / turn)))
        times = measure.interleaved(runs, repeats=repeats, warmup=0, group=group)
        times[None] = [contenders.limit_scale * seconds for seconds in times[None]]
        return times


def result(run):
    found = run()
    return found() if callable(found) else found


def memory_on_a_rank(work, name):
    """Return the bytes that this contender holds at most, see `memory.peak_bytes`."""
    with measure.unchecked_group() as group:
        return peak_bytes(work.contenders(group, *work.args).make[name])


def _rows(name, times):
    limit = measure.median(times.pop(None))
    medians = {contender: measure.median(series) for contender, series in times.items()}
    best = min(median for name, median in medians.items() if not name.startswith(OURS))
    return [
        {
            "work": name,
            "contender": contender,
            "median_s": medians[contender],
            "min_s": min(series),
            "repetitions": len(series),
            "limit_s": limit,
            "ratio_to_best_peer": medians[contender] / best,
        }
        for contender, series in times.items()
    ]


def table(rows) -> str:
    """The rows as text, times in milliseconds."""
    head = (
        "work",
        "contender",
        "median ms",
        "min ms",
        "limit ms",
        "over limit",
        "to best peer",
        "peak MB",
    )
    lines = [
        (
            row["work"],
            row["contender"],
            *(f"{1000 * row[key]:.3f}" for key in ("median_s", "min_s", "limit_s")),
            f"{row['median_s'] / row['limit_s']:.2f}",
            f"{row['ratio_to_best_peer']:.2f}",
            f"{row['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in row else "",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [head, *lines]
    )


def write(rows, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
