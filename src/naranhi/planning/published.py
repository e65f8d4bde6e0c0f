"""Published training runs: tables of this package, read as the arguments of `predict`."""

import json
from functools import lru_cache
from importlib.resources import files

from naranhi.planning.cluster import Cluster
from naranhi.planning.latent import Latent
from naranhi.planning.model import Model
from naranhi.planning.plan import Plan
from naranhi.planning.run import Run
from naranhi.planning.sources import read
from naranhi.planning.tables import rows


@lru_cache(maxsize=1)
def runs() -> tuple[Run, ...]:
    """Return the published runs of single configurations."""
    return tuple(map(read, rows("published_runs.csv")))


@lru_cache(maxsize=1)
def sweep() -> tuple[Run, ...]:
    """Return the runs of the sweep of two models on H100s, including those that failed."""
    return tuple(map(read, rows("published_runs_sweep.csv")))


@lru_cache(maxsize=1)
def independent() -> tuple[Run, ...]:
    """Return runs of other sources, to which nothing in the planner was fitted.

    Even so, two of the runs calibrate an efficiency, as `calibrations.csv` says, and the long
    sequences of NeMo 24.03 gave the FlashAttention generation of the engine "nemo-2024".
    """
    data = files("naranhi.planning").joinpath("data", "independent_runs.json")
    return tuple(map(_independent, json.loads(data.read_text(encoding="utf-8"))))


def _independent(row):
    sizes = dict(row["model"])
    if "latent" in sizes:
        sizes["latent"] = Latent(*sizes["latent"])
    return Run(
        row["source"],
        row["run"],
        Model(**sizes),
        Cluster(**row["cluster"]),
        Plan(**row["plan"]),
        row["sequence_length"],
        row["global_batch"],
        row["step_s"],
        None,
    )
