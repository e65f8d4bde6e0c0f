"""Checks that several programs need."""

from naranhi.planning.model import Model
from naranhi.planning.plan import Plan


def check_heads(program: str, model: Model, plan: Plan) -> None:
    """Raise ValueError if tensor parallelism would split a head of keys and values.

    Raises:
        ValueError: If `kv_heads` is not a multiple of the plan's tp.
    """
    if model.kv_heads % plan.tp:
        raise ValueError(
            f"{program} cannot run this plan: kv_heads = {model.kv_heads} is not a multiple of "
            f"tp = {plan.tp}, and each rank needs whole heads of keys and values; choose a tp that "
            f"divides {model.kv_heads}"
        )
