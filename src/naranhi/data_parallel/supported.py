"""Which models data parallelism and ZeRO can train: the others are refused before anything is sent.

Each of these would go wrong silently, or fail with words that do not name the cause.
"""

import torch
import torch.distributed as dist
from torch import nn

from naranhi.autograd.hooks import owner_of


def require_supported(model, group=None):
    """Raise on every rank where the model is not one that can be trained with copies on the ranks.

    Raises TypeError, on every rank of the group (None: the default one), naming the first module or
    parameter, for
    - embeddings with sparse gradients, which have no row to be summed in;
    - embeddings with `max_norm`, which change their weight in the forward: each rank another part;
    - parameters that are not initialised yet, or on the meta device: they have no values;
    - parameters of a tensor subclass of its own behaviour (`DTensor`, quantized ones);
    - parameters that accumulate their gradient in another dtype than their own;
    - a model that another `DDP` or `Zero` listens to: gradients would be summed twice.
    """
    group = group or dist.group.WORLD
    reasons = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, _unsupported(model), group=group)
    for rank, reason in enumerate(reasons):
        if reason:
            raise TypeError(reason if all(reasons) else f"on rank {rank} {reason}")


def require_same_parameters(model, names, kind):
    """Raise RuntimeError where a parameter is trained that is not in `names`, those of when `kind`
    was made: it was frozen then, or added or replaced since, and nobody sums its gradient."""
    for name, param in model.named_parameters():
        if param.requires_grad and param not in names:
            raise RuntimeError(
                f"parameter {name} requires a gradient, and did not when {kind} was "
                "made, or was not there: close() it and make another"
            )


def _unsupported(model):
    """What is wrong with a model, or None."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.sparse and module.weight.requires_grad:
                return (
                    f"embedding {name or 'itself'} has sparse gradients, which are not summed "
                    "over the ranks: make it with sparse=False"
                )
            if module.max_norm is not None:
                return (
                    f"embedding {name or 'itself'} has max_norm={module.max_norm}, with which "
                    "its forward changes the rows that this rank's share reads: the ranks' "
                    "weights would part"
                )
    for name, param in model.named_parameters():
        kind = type(param)
        if isinstance(param, nn.parameter.UninitializedTensorMixin):
            return f"parameter {name} is not initialised: run a forward of the lazy module first"
        if (kind.__torch_function__, kind.__torch_dispatch__) != (
            nn.Parameter.__torch_function__,
            nn.Parameter.__torch_dispatch__,
        ):
            return f"parameter {name} is a {kind.__name__}, not a plain parameter"
        if param.is_meta:
            return f"parameter {name} is on the meta device and has no values: materialise it first"
        if param.requires_grad and param.grad_dtype not in (None, param.dtype):
            return (
                f"parameter {name} of {param.dtype} accumulates its gradient in "
                f"{param.grad_dtype}: leave grad_dtype as it is"
            )
        owner = owner_of(param)
        if owner is not None:
            return (
                f"parameter {name} belongs to another {type(owner).__name__}, which sums its "
                "gradient as well: call close() on that first"
            )
    return None


def require_gradient(name, gradient):
    """Raise an error for a gradient that has come, and is not there or cannot be copied into a row:
    RuntimeError or TypeError."""
    if gradient is None:
        raise RuntimeError(
            f"the gradient of parameter {name} is gone: a hook on it has set grad "
            "to None before it could be summed over the ranks"
        )
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"parameter {name} has a gradient of layout {gradient.layout}, which is "
            "not summed over the ranks: use dense gradients (sparse=False)"
        )
