"""Which models ZeRO can train in mixed precision, and in which dtype their parameters compute."""

from __future__ import annotations

import torch
from torch import nn


def require_mixed(model: nn.Module) -> None:
    """Raise ValueError for modules that cannot compute in bf16 with buffers in fp32.

    Args:
        model: The model, with its parameters in fp32.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            mean = module.running_mean
            if mean is not None and mean.dtype == torch.float32:
                raise ValueError(
                    f"{name or 'the model'} is a {type(module).__name__} with running statistics "
                    "in float32, so its weight cannot be in bf16: convert the statistics "
                    "to bf16, make it without them (track_running_stats=False), or use "
                    "precision='fp32', under autocast"
                )


def computes_in(precision: str, name: str, parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype in which a parameter computes.

    Args:
        precision: As in `zero.Zero`.
        name: The parameter's name, for the message.
        parameter: The parameter as the optimizer trains it.

    Raises:
        ValueError: In mixed precision, for a floating-point parameter whose dtype is not fp32.
    """
    if precision == "fp32" or not parameter.is_floating_point():
        return parameter.dtype
    if parameter.dtype != torch.float32:
        raise ValueError(
            f"mixed precision needs parameters in float32, but {name} is in {parameter.dtype}"
        )
    return torch.bfloat16
