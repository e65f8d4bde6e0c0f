"""Gradients of parameters that every rank holds whole, but uses only on its part of the sequence.

With sequence parallelism, norms, position embeddings and biases added after a row-parallel product
see only this rank's tokens. Routers of experts on a tensor group see only this rank's tokens too,
and norms of queries and keys only this rank's heads, with sequence parallelism and without. Their
gradient is the sum of the ranks' partial gradients. Reducing once per step, after the last
backward, takes the fewest messages: `sum_sequence_gradients`. But ZeRO and `DDP` use a gradient as
soon as a backward has computed it, and a user's hook reads it at that time. If a parameter has such
hooks, each backward sums its gradient first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import TensorWeakRef

from naranhi.autograd.parameter_hooks import hooks_of_parameter
from naranhi.collectives.buckets import buckets, pack, unpack
from naranhi.distributed.shared_groups import SharesGroups
from naranhi.tensor_parallel.mappings import start_reduce
from naranhi.tensor_parallel.shards import ShardedModule, as_module


def sequence_parameters(
    model: nn.Module | list[nn.Module],
) -> dict[str, tuple[nn.Parameter, dist.ProcessGroup | None]]:
    """Return {name: (parameter, group)} of the parameters replicated in sequence parallelism.

    These are the trained parameters that every rank of the group holds whole, but uses only on its
    part of the sequence.
    """
    params = {}
    for prefix, module in as_module(model).named_modules():
        if isinstance(module, ShardedModule) and module.sequence:
            group, splits = module.group, module.splits
        elif "_sequence_group" in vars(module):
            group, splits = module._sequence_group.group, {}
        else:
            continue
        params |= {
            f"{prefix}.{name}".lstrip("."): (param, group)
            for name, param in module.named_parameters(recurse=False)
            if name not in splits and param.requires_grad
        }
    return params


def mark_sequence_module(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Mark a module, such as a norm, as running on this rank's part of the sequence."""
    module._sequence_group = _Group(group)


class _Group(SharesGroups):
    """A module's attribute that copies of the module share."""

    def __init__(self, group):
        self.group = group


def sum_before_other_hooks(model: nn.Module | list[nn.Module]) -> None:
    """Make backwards sum `sequence_parameters`' gradients over the group before other hooks run.

    `parallelize` calls it, and so does `Zero`, because a parameter may have been unfrozen, replaced
    (`load_state_dict(assign=True)`) or copied since, which leaves it without this hook.
    """
    for name, (param, group) in sequence_parameters(model).items():
        if _sum_of(param) is None:
            _add_sum(name, param, group)


def sum_sequence_gradients(model: nn.Module | list[nn.Module]) -> None:
    """Sum over the group the gradients of parameters replicated in sequence parallelism.

    Call it once per step, after the last micro-batch's backward and before the optimizer's step, on
    all ranks of the group. Sums over data-parallel ranks may come before or after. Without sequence
    parallelism only routers of `expert_parallel.add_experts(tensor=...)` and layers that a plan
    names as `PartialGradient` need it, and without those it does nothing.

    The gradient of a parameter with hooks (a user's, `DDP`'s, ZeRO's) is skipped: the backward
    already summed it, before the hooks saw it. So with ZeRO this call is not needed.

    Args:
        model: a module or a list of layers; on a pipeline, the stage's layers.

    Raises:
        RuntimeError: no such parameter has a gradient; or a gradient was summed before, and not set
            to zero since; or a parameter got a hook after its backward; or one has hooks, and was
            unfrozen, replaced or copied after `parallelize`.
    """
    params = _left_to_sum(model)
    if params and all(param.grad is None for param, _ in params.values()):
        raise RuntimeError(
            f"none of {', '.join(params)} has a gradient to be summed: call "
            "sum_sequence_gradients after the backward, before zero_grad()"
        )
    _sum(params)


def sum_before_reduction(model: nn.Module) -> None:
    """Do as `sum_sequence_gradients`, for a caller that takes the gradients from the parameters.

    `ZeroStages`, which calls this, puts no hooks on parameters, so no backward sums. Here it is not
    an error if no parameter has a gradient.

    Args:
        model: the layers of a stage.
    """
    _sum(_left_to_sum(model))


def _left_to_sum(model):
    """Return {name: (parameter, group)} of parameters whose gradients no backward sums."""
    params, late = {}, []
    for name, (param, group) in sequence_parameters(model).items():
        sum_of = _sum_of(param)
        if sum_of is None:  # unfrozen, replaced or copied since `parallelize`
            sum_of = _add_sum(name, param, group)
            sum_of.left = param.grad is not None
        if not sum_of.is_due():
            params[name] = param, group
        elif sum_of.left:
            late.append(name)
    if late:
        raise RuntimeError(
            f"{late[0]} got a hook after its backward, or was unfrozen, replaced or copied after "
            "parallelize and has hooks: its gradient is not summed over the tensor group, and the "
            "next ones will be; call zero_grad() and run the backward again"
        )
    return params


def _sum(params):
    """Sum the gradients of {name: (parameter, group)}, packed."""
    _refuse_second_sums({name: _sum_of(param) for name, (param, _) in params.items()})
    alike = {}  # by group; a parameter may have several names
    for param, group in params.values():
        alike.setdefault(group, {})[param] = None
    for group, some in alike.items():
        for bucket in buckets([*some]):
            _sum_bucket(bucket, group)
    for param, _ in params.values():
        _sum_of(param).end()


def _refuse_second_sums(sums):
    """Raise RuntimeError if a gradient includes a sum of an earlier call."""
    again = {name: flag for name, of in sums.items() if (flag := of.has_summed()) is not None}
    # The CPU waits for a GPU only if gradients are set to zero and not to None, or summed twice.
    if wrong := [name for name, flag in again.items() if flag]:
        raise RuntimeError(
            f"{wrong[0]} was already summed over the tensor group in this step: call "
            "sum_sequence_gradients once, after the last backward, or zero_grad() before another "
            "backward"
        )


def _sum_bucket(bucket, group):
    """Sum the gradients of parameters; one that some ranks lack is zero there.

    Each gradient travels with a flag: does this rank have it? A gradient that all ranks lack stays
    None, so that an optimizer leaves the parameter alone, as in one process.
    """
    missing = [number for number, param in enumerate(bucket) if param.grad is None]
    flags = bucket[0].new_ones(len(bucket))
    for number in missing:
        flags[number] = 0
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in bucket]
    unpack(start_reduce(pack([*grads, flags]), group)(), [*grads, flags])
    for number in missing:
        if flags[number]:
            bucket[number].grad = grads[number]


def unsummed(model: nn.Module | list[nn.Module]) -> list[str]:
    """Return the names of parameters whose gradients `sum_sequence_gradients` has yet to sum."""
    return [
        name
        for name, (param, _) in sequence_parameters(model).items()
        if param.grad is not None and ((sum_of := _sum_of(param)) is None or sum_of.left)
    ]


class _Sum:
    """A parameter's first hook: sums its gradient over the group if other hooks will see it."""

    def __init__(self, name, param, group):
        self.name, self.param, self.group = name, param, group
        self.left = False  # whether `param.grad` holds partial gradients, not yet summed
        self.summed = lambda: None  # the tensor that was `param.grad` when it was summed
        self.earlier = None  # whether partial gradients were added to a sum: see `has_summed`

    def is_due(self):
        return any(hook is not self for hook in hooks_of_parameter(self.param))

    def __call__(self, grad):
        if not self.is_due():
            self.earlier, self.left = self.has_summed(), True
            return None
        if self.left and self.param.grad is not None:
            raise RuntimeError(
                f"{self.name} got a hook between two backwards of one step: the gradient of the "
                "first is not summed over the tensor group; call zero_grad() first"
            )
        self.left, self.earlier = False, None
        return start_reduce(grad.clone(memory_format=torch.contiguous_format), self.group)()

    def has_summed(self):
        """Return whether `param.grad` includes an earlier sum, as a bool tensor; None for no.

        It does if it is the tensor that was summed, not zeroed by `zero_grad(set_to_none=False)`.
        """
        grad = self.param.grad
        if grad is None or self.summed() is not grad:
            return None
        return grad.any() if self.earlier is None else grad.any() & self.earlier

    def end(self):
        """Note that `param.grad` has been summed."""
        grad, self.left, self.earlier = self.param.grad, False, None
        self.summed = TensorWeakRef(grad) if grad is not None else lambda: None


def _add_sum(name, param, group):
    """Register a `_Sum` that runs before the hooks that the parameter has, and return it."""
    sum_of, earlier = _Sum(name, param, group), [*(param._backward_hooks or ())]
    param.register_hook(sum_of)
    for key in earlier:  # C++ does not see OrderedDict.move_to_end
        param._backward_hooks[key] = param._backward_hooks.pop(key)
    return sum_of


def _sum_of(param):
    return next((hook for hook in hooks_of_parameter(param) if isinstance(hook, _Sum)), None)
