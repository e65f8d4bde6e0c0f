"""Values for layers that were built, and split, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from naranhi.tensor_parallel.sequence_gradients import sum_before_other_hooks
from naranhi.tensor_parallel.shards import as_module, require_shape, splits_of


@torch.no_grad()
def materialize(model: nn.Module | list[nn.Module], state: Mapping[str, torch.Tensor]) -> None:
    """Give parameters on the meta device values: copies of this rank's shards of whole tensors.

    A parameter that several layers share stays one. One that has values already keeps them.

    Args:
        model: a module, or a list of layers, split by `parallelize` or not.
        state: {name: whole tensor}, of some of the parameters.

    Raises:
        ValueError: a name is unknown, or a tensor has a shape different from the unsplit model's;
            raised before anything is changed.
    """
    module, new = as_module(model), {}
    named, splits = dict(module.named_parameters(remove_duplicate=False)), splits_of(module)
    for name, whole in state.items():
        if name not in named:
            raise ValueError(f"{name} is in the state only")
        require_shape(name, whole, param := named[name], splits.get(param))
        if param.is_meta and param not in new:
            split, group = splits.get(param, (None, None))
            own = split.shard(whole, dist.get_rank(group)) if split else whole.detach().clone()
            new[param] = nn.Parameter(own.to(param.dtype), param.requires_grad)
            vars(new[param]).update(vars(param))
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False):
            if param in new:
                setattr(owner, name, new[param])
    sum_before_other_hooks(module)
