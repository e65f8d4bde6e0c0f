"""How long a step takes and how much memory it needs, before running it.

`predict` forecasts a `Plan` of a `Model` on a `Cluster`; `search` finds the plans that fit, best
first; `explain` says why. Every second and byte belongs to a named part, and each forecast states
how far it may be off. `accuracy` compares forecasts with published runs. Nothing here needs torch.
"""

from naranhi.planning.cluster import Cluster, Gpu, gpus
from naranhi.planning.engine import Engine, engines
from naranhi.planning.explanation import describe, explain
from naranhi.planning.forecast import Forecast
from naranhi.planning.latent import Latent
from naranhi.planning.machine import Layer, Line, Machine
from naranhi.planning.memory import Memory
from naranhi.planning.model import Matmul, Model
from naranhi.planning.plan import Plan, PlanError
from naranhi.planning.plan_search import Found, search
from naranhi.planning.prediction import predict

__all__ = [
    "Cluster",
    "Engine",
    "Forecast",
    "Found",
    "Gpu",
    "Latent",
    "Layer",
    "Line",
    "Machine",
    "Matmul",
    "Memory",
    "Model",
    "Plan",
    "PlanError",
    "describe",
    "engines",
    "explain",
    "gpus",
    "predict",
    "search",
]
