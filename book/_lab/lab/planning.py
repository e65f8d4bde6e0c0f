"""The planner's table for a reader's model and GPUs."""

import json
from pathlib import Path
from typing import Any

from lab.fields import Field, InputError
from naranhi.planning import Cluster, Model, describe, engines, explain, gpus, search
from naranhi.planning.cli import written
from naranhi.planning.config import family_of

MODELS = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
BEST = 10
FREE = ("cached", "fragments")  # in no use at the fullest moment
FIELDS = (
    Field("model", "choice", "Llama 2 7B", choices=(*MODELS, "config.json")),
    Field("config", "text", "", only=("model", ("config.json",))),
    Field("gpu", "choice", "H100", choices=tuple(gpus())),
    Field("gpus", "whole", "64", 1, 4096),
    Field("gpus_per_node", "whole", "", 1, 1024),
    Field("network", "number", "", 1e-3, 1e4),
    Field("memory_gib", "number", "", 1e-3, 2e3),
    Field("sequence_length", "whole", "4096", 1, 10**7),
    Field("global_batch", "whole", "512", 1, 10**7),
    Field("engine", "choice", "megatron", choices=tuple(engines())),
    Field("precision", "choice", "bf16", choices=("bf16", "fp8", "fp32")),
)


def run(
    model: str,
    config: str,
    sequence_length: int,
    global_batch: int,
    precision: str,
    **cluster: Any,
) -> dict[str, Any]:
    """Return the plans that fit, the fastest first, and why the first one."""
    sizes = configuration(model, config)
    found = search(
        Model.from_config(sizes),
        Cluster(**cluster),
        sequence_length,
        global_batch,
        best=BEST,
        precision=precision,
    )
    result = {
        "outputs": {
            "parameters": {"value": found.model.parameters, "unit": ""},
            "tried": {"value": found.tried, "unit": ""},
        },
        "text": explain(found),
    }
    if not found.plans:
        return result
    plan, forecast = found[0]
    parts = {name: seconds for name, seconds in forecast.parts.items() if seconds}
    rank = max(forecast.memory, key=lambda memory: memory.total)
    memory = {name: held for name, held in rank._asdict().items() if held and name not in FREE}
    result["outputs"] |= {
        "plan": {"value": describe(plan), "unit": ""},
        "step_seconds": {"value": forecast.step_seconds, "unit": "s", "sum": parts},
        "memory_bytes": {"value": forecast.memory_bytes, "unit": "B", "sum": memory},
    }
    columns = (
        ("plan", ""),
        ("step_seconds", "s"),
        ("low", "s"),
        ("high", "s"),
        ("tokens_per_second_per_gpu", ""),
        ("mfu", "%"),
        ("memory_bytes", "B"),
    )
    rows = [
        [describe(plan), *(getattr(forecast, name) for name, _ in columns[1:])]
        for plan, forecast in found.plans
    ]
    result["table"] = {"columns": columns, "rows": rows}
    result["commands"] = written(found, "config.json", family_of(sizes))
    return result


def configuration(model: str, config: str) -> dict[str, Any]:
    """Return the configuration of a model of the list, or the one that a reader pasted.

    Raises:
        InputError: if what was pasted is not a JSON object.
    """
    if model != "config.json":
        return MODELS[model]
    try:
        pasted = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise InputError("no_config", why=str(error)) from None
    if not isinstance(pasted, dict):
        raise InputError("no_config", why=type(pasted).__name__)
    return pasted
