"""The calculator of activation memory: what a Transformer layer keeps for its backward."""

from typing import Any

from lab.fields import Field
from lab.formula import output
from naranhi import costs
from naranhi.costs.activations import RECOMPUTE

FIELDS = (
    Field("sequence", "whole", "2048", 1, 10**8),
    Field("microbatch", "whole", "1", 1, 10**6),
    Field("hidden", "whole", "4096", 1, 10**6),
    Field("heads", "whole", "32", 1, 10**5),
    Field("tensor_parallel", "whole", "1", 1, 1024),
    Field("sequence_parallel", "choice", "no", choices=("no", "yes")),
    Field("recompute", "choice", "none", choices=RECOMPUTE),
)
# (recompute, sequence parallel) -> the formula of the package's docstring.
FORMULAS = {
    ("none", "no"): "s * b * h * (10 + 24 / t + 5 * a * s / (h * t))",
    ("none", "yes"): "s * b * h * (34 / t + 5 * a * s / (h * t))",
    ("selective", "no"): "s * b * h * (10 + 24 / t)",
    ("selective", "yes"): "34 * s * b * h / t",
    ("full", "no"): "2 * s * b * h",
    ("full", "yes"): "2 * s * b * h",
}


def run(
    sequence: int,
    microbatch: int,
    hidden: int,
    heads: int,
    tensor_parallel: int,
    sequence_parallel: str,
    recompute: str,
) -> dict[str, Any]:
    """Return the bytes of a layer, beside the formula, and item by item."""
    sizes = (sequence, microbatch, hidden, heads, tensor_parallel, sequence_parallel == "yes")
    numbers = {"s": sequence, "b": microbatch, "h": hidden, "a": heads, "t": tensor_parallel}
    held = costs.transformer_layer_bytes(*sizes, recompute)
    items = costs.transformer_layer_items(*sizes, recompute)
    formula = FORMULAS[recompute, sequence_parallel]
    return {
        "outputs": {"transformer_layer_bytes": output(held, "B", formula, **numbers)},
        "table": {
            "columns": [["item", ""], ["bytes", "B"]],
            "rows": [[item.item, item.bytes] for item in items],
        },
    }
