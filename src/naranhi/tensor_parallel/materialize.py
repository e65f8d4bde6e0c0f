"""Values for layers that were built, and split, on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import nn

from naranhi.tensor_parallel.sequence_gradients import sum_before_other_hooks
from naranhi.tensor_parallel.shards import as_module, require_shape, splits_of


@torch.no_grad()
def materialize(
    model: nn.Module | list[nn.Module],
    state: Mapping[str, torch.Tensor],
    *,
    shards: Collection[str] = (),
) -> None:
    """Give values to parameters on the meta device: copies of this rank's shards of whole tensors.

    A parameter that several layers share stays shared. A parameter with values keeps them.

    Args:
        model: a module, or a list of layers, split by `parallelize` or not.
        state: {name: whole tensor}, of some of the parameters.
        shards: the names of the tensors in `state` that are already this rank's shards.

    Raises:
        ValueError: a name is unknown, or a tensor has a shape different from the unsplit model's;
            raised before anything is changed.
    """
    module, new = as_module(model), {}
    named, splits = dict(module.named_parameters(remove_duplicate=False)), splits_of(module)
    for name, whole in state.items():
        if name not in named:
            raise ValueError(f"{name} is in the state only")
        param = named[name]
        split = None if name in shards else splits.get(param)
        require_shape(name, whole, param, split)
        if param.is_meta and param not in new:
            if split is None:
                own = whole.detach().clone(memory_format=torch.contiguous_format)
            else:
                own = split[0].shard(whole, dist.get_rank(split[1]))
            new[param] = nn.Parameter(own.to(param.dtype), param.requires_grad)
            vars(new[param]).update(vars(param))
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False):
            if param in new:
                setattr(owner, name, new[param])
    sum_before_other_hooks(module)
