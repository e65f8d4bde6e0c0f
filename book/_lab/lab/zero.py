"""The calculator of ZeRO: the bytes of model state on a rank, and what it sends."""

from typing import Any

from lab.fields import Field
from lab.formula import output
from naranhi import costs

FIELDS = (
    Field("parameters", "number", "7e9"),
    Field("ranks", "whole", "8", 1, 1_000_000, (1, 64, 1)),
    Field("stage", "choice", "3", choices=("0", "1", "2", "3")),
    Field("precision", "choice", "bf16", choices=("bf16", "fp32")),
    Field("optimizer", "choice", "adam", choices=("adam", "momentum", "sgd")),
)
# By stage: k bytes of optimizer state for each parameter, g of its gradient, w of itself.
FORMULAS = (
    "parameters * (k + g + w)",
    "parameters * (k / n + g + w)",
    "parameters * ((k + g) / n + w)",
    "parameters * ((k + g + w) / n)",
)


def run(
    parameters: float, ranks: int, stage: str, precision: str, optimizer: str
) -> dict[str, Any]:
    """Return the bytes of a stage beside its formula, and of all stages."""
    rows = []
    for each in range(4):
        held = costs.zero_bytes(parameters, ranks, each, precision, optimizer)
        sent = costs.zero_bytes_sent(parameters, ranks, each, precision)
        rows.append([each, held, sent])
    numbers = {"parameters": parameters, "n": ranks, **for_each(precision, optimizer)}
    _, held, sent = rows[int(stage)]
    return {
        "outputs": {
            "zero_bytes": output(held, "B", FORMULAS[int(stage)], **numbers),
            "zero_bytes_sent": output(sent, "B"),
        },
        "table": {
            "columns": [["stage", ""], ["zero_bytes", "B"], ["zero_bytes_sent", "B"]],
            "rows": rows,
        },
    }


def for_each(precision: str, optimizer: str) -> dict[str, int]:
    """Return the bytes for each parameter of what a stage shards: half of it, on two ranks."""
    held = [costs.zero_bytes(1, 2, stage, precision, optimizer) for stage in range(4)]
    return {name: round(2 * (held[i] - held[i + 1])) for i, name in enumerate("kgw")}
