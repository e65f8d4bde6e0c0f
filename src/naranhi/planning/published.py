"""Published training runs: tables of this package, read as the arguments of `predict`."""

from functools import lru_cache

from naranhi.planning.cluster import rows
from naranhi.planning.run import Run
from naranhi.planning.sources import read


@lru_cache(maxsize=1)
def runs() -> tuple[Run, ...]:
    """Return the published runs of single configurations."""
    return tuple(map(read, rows("published_runs.csv")))


@lru_cache(maxsize=1)
def sweep() -> tuple[Run, ...]:
    """Return the runs of the sweep of two models on H100s, those that failed included."""
    return tuple(map(read, rows("published_runs_sweep.csv")))
