"""Which models data parallelism and ZeRO can train; others raise an error before any message.

Each of those would go wrong silently, or fail with a message that does not name the cause.
"""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.distributed as dist
from torch import nn

from naranhi.autograd.hooks import owner_of
from naranhi.distributed import from_all_ranks
from naranhi.distributed.agreement import Axes, groups_of


def require_supported(model: nn.Module, group: Axes = None) -> None:
    """Raise on every rank if the model cannot be trained with replicas on the ranks.

    That is a model with one of these:

    - embeddings with sparse gradients, which cannot be summed in a flat buffer;
    - embeddings with `max_norm`, which change their weight in the forward: each rank another part;
    - parameters that are not initialized yet, or on the meta device: they have no values;
    - parameters of a tensor subclass with behaviour of its own (`DTensor`, quantized ones);
    - parameters that accumulate their gradient in another dtype than their own;
    - hooks of another `DDP` or `Zero`: gradients would be summed twice;
    - layers of which these ranks hold different shards (tensor parallel layers, experts): they
      would be overwritten by the first rank's, and their gradients mixed up;
    - experts that are divided over other ranks too, which have tokens of their own: the gradients
      of those would be left out (`expert_parallel.sum_gradients` sums them).

    Args:
        model: This rank's replica.
        group: The process group, or several axes; None for the default group.

    Raises:
        TypeError: On every rank of the group, naming the first such module or parameter.
    """
    reasons = from_all_ranks(_unsupported(model) or _sharded(model, group), group)
    for rank, reason in enumerate(reasons):
        if reason:
            raise TypeError(reason if all(reasons) else f"on rank {rank} {reason}")


def require_unsummed(model: nn.Module) -> None:
    """Raise if something else sums a gradient of the model.

    Raises:
        RuntimeError: Naming the first such parameter, and what it belongs to.
    """
    for name, param in model.named_parameters():
        if (owner := owner_of(param)) is not None:
            raise RuntimeError(
                f"parameter {name} belongs to a {type(owner).__name__}, which sums its gradient: "
                "a second sum would multiply it by the number of ranks"
            )


def require_same_parameters(model: nn.Module, names: Container[nn.Parameter], kind: str) -> None:
    """Raise if the model trains a parameter that was not trained when `kind` was made.

    The parameter was frozen then, or was added or replaced since, so its gradient would not be
    summed.

    Args:
        model: The model as it is now.
        names: The parameters that were trained when `kind` was made.
        kind: The name of the class that sums gradients, for the message.

    Raises:
        RuntimeError: For the first parameter that requires a gradient and is not in `names`.
    """
    current = (param for module in model.modules() for param in module._parameters.values())
    if all(param is None or not param.requires_grad or param in names for param in current):
        return  # as in every backward, in half the time that the names take
    for name, param in model.named_parameters():
        if param.requires_grad and param not in names:
            raise RuntimeError(
                f"parameter {name} requires a gradient, and did not when {kind} was "
                "made, or was not there: close() it and make another"
            )


def _unsupported(model):
    """Return what is wrong with a model, or None."""
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
            return f"parameter {name} is not initialized: run a forward of the lazy module first"
        if (kind.__torch_function__, kind.__torch_dispatch__) != (
            nn.Parameter.__torch_function__,
            nn.Parameter.__torch_dispatch__,
        ):
            return f"parameter {name} is a {kind.__name__}, not a plain parameter"
        if param.is_meta:
            return f"parameter {name} is on the meta device and has no values: materialize it first"
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


def _sharded(model, group):
    """Return which layer has other shards on other ranks of the group, or None."""
    ranks = {rank for axis in groups_of(group) for rank in dist.get_process_group_ranks(axis)}
    for name, module in model.named_modules():
        if getattr(module, "splits", None):  # of `tensor_parallel.ShardedModule`
            others = ranks & {*dist.get_process_group_ranks(module.group)} - {dist.get_rank()}
            if others:
                return (
                    f"{type(module).__name__} {name or 'itself'} has other shards on rank "
                    f"{', '.join(map(str, sorted(others)))}: replicas are ranks that hold the same "
                    "shards"
                )
            outside = {*dist.get_process_group_ranks(module.group)} - ranks
            if outside and getattr(module, "own_tokens", False):
                return (
                    f"{type(module).__name__} {name or 'itself'} has experts on rank "
                    f"{', '.join(map(str, sorted(outside)))} too, which is not in the group and "
                    "has tokens of its own, whose gradients would be left out: use "
                    "expert_parallel.sum_gradients instead"
                )
    return None


def require_gradient(name: str, gradient: torch.Tensor | None) -> None:
    """Raise if a gradient that has arrived is gone, or cannot be copied into a flat buffer.

    Args:
        name: The parameter's name, for the message.
        gradient: Its `.grad`.

    Raises:
        RuntimeError: If the gradient is None, because a hook has removed it, or has a graph, which
            the sum over the ranks would not have.
        TypeError: If the gradient is not dense.
    """
    if gradient is None:
        raise RuntimeError(
            f"the gradient of parameter {name} is gone: a hook on it has set grad "
            "to None before it could be summed over the ranks"
        )
    if gradient.requires_grad:
        raise RuntimeError(
            f"the gradient of parameter {name} has a graph, from backward(create_graph=True), "
            "which the sum over the ranks would not have: compute what is to be differentiated "
            "again by torch.autograd.grad(..., create_graph=True), then call backward()"
        )
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"parameter {name} has a gradient of layout {gradient.layout}, which is "
            "not summed over the ranks: use dense gradients (sparse=False)"
        )
