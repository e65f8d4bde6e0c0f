"""The calculator of collectives: the alpha-beta model."""

from typing import Any

from lab.fields import Field
from lab.formula import output
from naranhi import costs

FIELDS = (
    Field("collective", "choice", "all_reduce", choices=tuple(costs.ALGORITHMS)),
    Field("bytes", "number", "1e9"),
    Field("ranks", "whole", "8", 1, 100_000, (1, 64, 1)),
    Field("alpha", "number", "1e-5"),
    Field("beta", "number", "2.5e-11"),
)


def run(collective: str, bytes: float, ranks: int, alpha: float, beta: float) -> dict[str, Any]:
    """Return the seconds of each algorithm, and of the fastest how they come about."""
    best = costs.fastest(collective, bytes, ranks, alpha, beta)
    rows = []
    for algorithm in costs.ALGORITHMS[collective]:
        if (collective, algorithm) in costs.POWER_OF_TWO_ONLY and ranks & (ranks - 1):
            rows.append([algorithm, None, None, None])
            continue
        messages, volume = in_a_row(collective, bytes, ranks, algorithm)
        seconds = costs.collective_seconds(collective, bytes, ranks, alpha, beta, algorithm)
        rows.append([algorithm, messages, volume, seconds])
    messages, volume = in_a_row(collective, bytes, ranks, best)
    seconds = costs.collective_seconds(collective, bytes, ranks, alpha, beta, best)
    formula = "messages * alpha + volume * beta"
    numbers = {"messages": messages, "volume": volume, "alpha": alpha, "beta": beta}
    return {
        "outputs": {
            "fastest": {"value": best, "unit": ""},
            "collective_seconds": output(seconds, "s", formula, **numbers),
            "bytes_sent": output(costs.bytes_sent(collective, bytes, ranks, best), "B"),
        },
        "table": {
            "columns": [
                ["algorithm", ""],
                ["messages_in_a_row", ""],
                ["bytes_in_a_row", "B"],
                ["collective_seconds", "s"],
            ],
            "rows": rows,
        },
    }


def in_a_row(collective: str, bytes: float, ranks: int, algorithm: str) -> tuple[float, float]:
    """Return the messages and the bytes that follow one another: what the model counts of each."""
    messages = costs.collective_seconds(collective, bytes, ranks, 1, 0, algorithm)
    return messages, costs.collective_seconds(collective, bytes, ranks, 0, 1, algorithm)
