"""Which models data parallelism and ZeRO can train; others raise an error before any message.

Such a model would go wrong silently, or fail with a message that does not name the cause.
"""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.distributed as dist
from torch import nn

from naranhi.autograd.hooks import owner_of, owner_of_state
from naranhi.autograd.parameter_hooks import hooks_of_parameter
from naranhi.distributed import from_all_ranks
from naranhi.distributed.agreement import Axes


def require_supported(model: nn.Module, group: Axes = None, *, experts: bool = False) -> None:
    """Raise on every rank if the model cannot be trained with replicas on the ranks.

    Such a model has one of these:

    - embeddings with sparse gradients, which cannot be summed in a flat buffer;
    - embeddings with `max_norm`, whose forward changes their weight, differently on each rank;
    - parameters that are not initialized yet, or on the meta device: they have no values;
    - buffers on the meta device, or sparse, or with several elements in one place of memory
      (`expand`), which cannot be sent or written;
    - parameters of a tensor subclass that overrides behaviour (`DTensor`, quantized ones);
    - parameters that accumulate their gradient in a different dtype from theirs;
    - hooks of another `DDP`, `Zero` or `ZeroStages`: gradients would be summed twice;
    - layers of which these ranks hold different shards (tensor parallel layers, experts): the
      first rank's would overwrite the rest, and their gradients would be mixed up;
    - experts that are divided over other ranks too, or have copies there: those ranks have
      different tokens, whose gradients would be left out (`expert_parallel.sum_gradients` sums
      them).

    Args:
        model: This rank's replica.
        group: The process group, or several axes; None for the default group.
        experts: Whether the caller sums the gradients of experts over their copies. Then divided
            experts are supported, if all of them are on the ranks of `group`, and a layer's
            `replicas` has all of their copies there.

    Raises:
        TypeError: On every rank of the group, naming the first such module or parameter.
    """
    ranks = from_all_ranks(dist.get_rank(), group)
    reasons = from_all_ranks(_unsupported(model) or _sharded(model, {*ranks}, experts), group)
    for rank, reason in enumerate(reasons):
        if reason:
            raise TypeError(reason if all(reasons) else f"on rank {rank} {reason}")


def require_replicas(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise if sums over the group would mix gradients of different shards, or leave some out.

    Raises:
        TypeError: Naming the first layer with different shards on ranks of the group, or with
            experts on ranks outside of it.
    """
    if reason := _sharded(model, _ranks(group), experts=False):
        raise TypeError(reason)


def require_first_sums(model: nn.Module) -> None:
    """Raise if a gradient that a tensor group has in partial sums is not summed by a hook.

    Raises:
        TypeError: Naming the first parameter without the hook that `parallelize` puts on it.
    """
    for prefix, module in model.named_modules():
        mark, splits = vars(module).get("_sequence_group"), {}
        if mark is None and _is_split(module) and getattr(module, "sequence", False):
            mark, splits = module, module.splits
        if mark is not None and dist.get_world_size(mark.group) > 1:
            for name, param in module.named_parameters(recurse=False):
                first = any(hasattr(hook, "is_due") for hook in hooks_of_parameter(param))
                if name not in splits and param.requires_grad and not first:
                    raise TypeError(
                        f"parameter {prefix}.{name} was unfrozen, replaced or copied after "
                        "parallelize, and has its gradient in part on each rank of the tensor "
                        "group: call tensor_parallel.sum_before_other_hooks(model) first"
                    )


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
        return  # the usual case, in half the time that the names take
    for name, param in model.named_parameters():
        if param.requires_grad and param not in names:
            raise RuntimeError(
                f"parameter {name} was unfrozen, added or replaced after {kind} was made: call "
                f"close() on {kind}, and make a new one"
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
                    f"embedding {name or 'itself'} has max_norm={module.max_norm}, so its forward "
                    "changes the rows that it reads, and the ranks' weights would diverge: make it "
                    "without max_norm"
                )
    for name, buffer in model.named_buffers():
        if isinstance(buffer, nn.parameter.UninitializedTensorMixin):
            return f"buffer {name} is not initialized: run a forward of the lazy module first"
        if buffer.is_meta:
            return f"buffer {name} is on the meta device and has no values: compute it first"
        if buffer.layout is not torch.strided:
            return f"buffer {name} is {buffer.layout}, which is not sent: use to_dense()"
        if torch._debug_has_internal_overlap(buffer) == 1:
            return f"buffer {name} has several elements in one place of memory: clone() it"
    sharded = _sharded_stages(model)
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
        if (owner := owner_of(param) or sharded.get(param)) is not None:
            return (
                f"parameter {name} belongs to another {type(owner).__name__}, which sums its "
                "gradient as well: call close() on that first"
            )
    return None


def _sharded_stages(model):
    """Return {trained parameter: its `Zero`}: one for stages has no hooks on parameters."""
    owners = ((module, owner_of_state(module)) for module in model.modules())
    return {
        param: owner.zero
        for module, owner in owners
        if hasattr(owner, "zero")  # a `zero.whole.Whole`
        for param in module.parameters(recurse=False)
        if param.requires_grad
    }


def _sharded(model, ranks, experts):
    """Return what is wrong with the first layer that ranks do not hold as replicas; or None."""
    for name, module in model.named_modules():
        if _is_split(module) and module.splits:
            own_tokens = getattr(module, "own_tokens", False)  # as in `expert_parallel.MoE`
            what = f"{type(module).__name__} {name or 'itself'}"
            if own_tokens and (problem := _experts(module, ranks, experts)):
                return f"{what} has {problem}"
            others = ranks & _ranks(module.group) - {dist.get_rank()}
            if others and not (experts and own_tokens):
                return (
                    f"{what} has different shards on rank {_list(others)}: pass a group of ranks "
                    "that hold the same shards, such as Mesh.replicas"
                )
    return None


def _experts(module, ranks, apart):
    """Return what is wrong with the ranks of experts; `apart`: copies are summed separately."""
    holders, copies, tensor = _ranks(module.group), {dist.get_rank()}, {dist.get_rank()}
    if module.replicas is not None:
        copies = _ranks(module.replicas)
    left_out = (
        ", outside the group: the gradients of the tokens there would be left out; use "
        "expert_parallel.sum_gradients instead"
    )
    if not apart and (outside := holders - ranks):
        return f"experts on rank {_list(outside)} too{left_out}"
    if mark := getattr(module.router, "_sequence_group", None):
        tensor = _ranks(mark.group)  # these ranks have copies, and different tokens
    if not apart and (outside := (copies | tensor) - ranks):
        return f"copies of its experts on rank {_list(outside)}{left_out}"
    several = apart and len(holders | copies | tensor) > 1
    within, everywhere = len(holders & ranks) * len(copies & ranks), len(holders) * len(copies)
    if several and (within, everywhere) != (len(ranks), len(ranks) * len(tensor)):
        groups = f" and tensor groups of {len(tensor)}" if len(tensor) > 1 else ""
        return (
            f"experts that are divided over {len(holders)} ranks (copies of each: {len(copies)}), "
            f"which does not fit a group of {len(ranks)} ranks{groups}: pass to the layer, as "
            "`replicas`, all ranks with copies (Mesh.expert_replicas), and here, as the group, all "
            "ranks with the same dense layers (Mesh.replicas)"
        )
    return None


def _is_split(module):
    """Return whether it is a `tensor_parallel.ShardedModule`, whose shards differ by rank."""
    group = getattr(module, "group", "none")
    of_ranks = group is None or isinstance(group, dist.ProcessGroup)
    return of_ranks and isinstance(getattr(module, "splits", None), dict)


def _ranks(group):
    return {*dist.get_process_group_ranks(group)}


def _list(ranks):
    return ", ".join(map(str, sorted(ranks)))


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
