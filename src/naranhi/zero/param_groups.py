"""Parameter groups, as torch's optimizers take them, for a model whose shards are trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def numbered(
    groups: Iterable[dict[str, Any]] | None, name_of: Mapping[nn.Parameter, str]
) -> tuple[dict[nn.Parameter, int], list[dict[str, Any]]]:
    """Return {parameter: number of its group}, and the options of each group.

    Args:
        groups: The groups, with parameters alone or beside their names; None for a single one.
        name_of: The model's parameters, with their names.

    Raises:
        ValueError: A trained parameter is in no group or in two, or a group has one that is not
            the model's.
    """
    trained = [param for param in name_of if param.requires_grad]
    options = [{"params": trained}] if groups is None else [dict(group) for group in groups]
    group_of = {}
    for number, group in enumerate(options):
        params = group.pop("params")
        for parameter in [params] if isinstance(params, torch.Tensor) else params:
            parameter = parameter[1] if isinstance(parameter, tuple) else parameter  # with name
            if parameter not in name_of:
                raise ValueError(f"parameter group {number} has a parameter not in the model")
            if parameter in group_of:
                raise ValueError(f"parameter {name_of[parameter]} is in two groups")
            group_of[parameter] = number
    missing = next((param for param in trained if param not in group_of), None)
    if missing is not None:
        raise ValueError(f"parameter {name_of[missing]} requires a gradient and is in no group")
    return group_of, options
