"""Which shard of a parameter a rank of a tensor group holds; sharding and unsharding whole models.

A layer that holds shards of parameters lists them in `splits`, {name of a parameter: Split}, beside
`group`. Parameters that are not in `splits` are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from naranhi.distributed.shared_groups import SharesGroups
from naranhi.tensor_parallel.mappings import start_gather


class Split(NamedTuple):
    """How a tensor is sharded. A size that the ranks do not divide is padded with zeros at the end.

    Args:
        dim: the dimension along which the tensor is split.
        size: the length of the whole tensor along `dim`, in elements.
        ranks: the number of shards.
        parts: how many tensors are concatenated along `dim`, such as 3 for queries, keys and
            values. Each of them is split, so that a rank has a shard of each.
    """

    dim: int
    size: int
    ranks: int
    parts: int = 1

    def shard(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a copy of this rank's shard of `whole`."""
        each = -(-self.size // (self.parts * self.ranks))  # elements of each part, rounded up
        pieces = []
        for part in whole.tensor_split(self.parts, self.dim):
            piece = part.tensor_split([each * rank, each * (rank + 1)], self.dim)[1]
            missing = list(piece.shape)
            missing[self.dim] = each - piece.shape[self.dim]
            pieces += [piece, piece.new_zeros(missing)]
        return torch.cat(pieces, self.dim)

    def join(self, shards: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor of all ranks' shards: the inverse of `shard`."""
        pieces = zip(*(shard.chunk(self.parts, self.dim) for shard in shards), strict=True)
        whole = torch.cat([piece for part in pieces for piece in part], self.dim)
        return whole.narrow(self.dim, 0, self.size)


class ShardedModule(SharesGroups, nn.Module):
    """A layer of which each rank of a group holds a shard.

    Args:
        group: the process group; None for the default one.
        sequence: whether activations outside are split along the sequence (sequence parallelism).
    """

    group: dist.ProcessGroup | None
    sequence: bool
    rank: int
    ranks: int
    splits: dict[str, Split]

    def __init__(self, group: dist.ProcessGroup | None, sequence: bool = False):
        super().__init__()
        self.group, self.sequence = group, sequence
        self.rank, self.ranks, self.splits = dist.get_rank(group), dist.get_world_size(group), {}

    def take(self, name: str, whole: nn.Parameter | None, split: Split | None = None) -> None:
        """Register this rank's shard of `whole` as a parameter; without `split`, all of `whole`."""
        if whole is not None and split:
            self.splits[name] = split
            shard = split.shard(whole.detach(), self.rank)
            whole = nn.Parameter(shard, requires_grad=whole.requires_grad)
        self.register_parameter(name, whole)

    def extra_repr(self) -> str:
        """Return what `print` shows of the layer: the shapes of this rank's shards."""
        shapes = (f"{name}={tuple(p.shape)}" for name, p in self.named_parameters(recurse=False))
        return ", ".join([*shapes, f"rank={self.rank} of {self.ranks}"])


def as_module(model: nn.Module | list[nn.Module]) -> nn.Module:
    """Return a module as it is, or a list of layers as a module that names them by index."""
    return model if isinstance(model, nn.Module) else nn.ModuleList(model)


def splits_of(model: nn.Module) -> dict[nn.Parameter, tuple[Split, dist.ProcessGroup | None]]:
    """Return the sharded parameters, each with how it is split and the group that has its shards.

    Args:
        model: a module, of which any layers may be split.
    """
    return {
        getattr(module, name): (split, module.group)
        for module in model.modules()
        if isinstance(module, ShardedModule)
        for name, split in module.splits.items()
    }


def _splits(model):
    """Return {name in the state_dict: (Split, group)} of all sharded parameters."""
    split_of = splits_of(model)
    state = model.state_dict(keep_vars=True).items()  # extra state may not be a tensor
    tensors = {name: value for name, value in state if isinstance(value, torch.Tensor)}
    return {name: split_of[param] for name, param in tensors.items() if param in split_of}


@torch.no_grad()
def full_state_dict(model: nn.Module | list[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the unsplit model's state_dict on every rank: shards gathered, padding stripped.

    All tensors are copies, also of parameters that are not split.

    Args:
        model: a module, or a list of layers, split by `parallelize`, or some of its layers; every
            rank of the tensor group calls this function with the same layers.
    """
    model = as_module(model)
    split_of, state, whole = splits_of(model), model.state_dict(keep_vars=True), {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):  # extra state
            continue
        if value not in whole:  # a tied parameter has two names
            whole[value] = _whole(value.detach(), *split_of.get(value, (None, None)))
        state[name] = whole[value]
    return dict(state)


def _whole(tensor, split, group):
    """Return a copy of the whole tensor, of which this rank has a shard if there is a split."""
    if split is None:
        return tensor.clone()
    return split.join(start_gather(tensor, group, split.dim)().chunk(split.ranks, split.dim))


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module | list[nn.Module], state: Mapping[str, torch.Tensor]
) -> None:
    """Load the state_dict of an unsplit model: each rank copies its shards of it.

    Args:
        model: a module, or a list of layers, split by `parallelize`, or some of its layers.
        state: {name: whole tensor}.

    Raises:
        ValueError: a name is missing or unknown, or a tensor has a shape different from the unsplit
            model's; raised before anything is changed.
    """
    model = as_module(model)
    splits, own = _splits(model), model.state_dict()
    if state.keys() != own.keys():
        name = sorted(state.keys() ^ own.keys())[0]
        raise ValueError(f"{name} is in the {'model' if name in own else 'state'} only")
    for name, part in own.items():
        if not isinstance(part, torch.Tensor):  # extra state
            continue
        require_shape(name, state[name], part, splits.get(name))
    shards = dict(state)
    for name, (split, group) in splits.items():
        shards[name] = split.shard(state[name], dist.get_rank(group))
    model.load_state_dict(shards)


def require_shape(
    name: str,
    whole: torch.Tensor,
    part: torch.Tensor,
    split: tuple[Split, dist.ProcessGroup | None] | None,
) -> None:
    """Raise ValueError unless a tensor has the shape of the whole parameter.

    Args:
        name: the parameter's name, for the error.
        whole: the tensor.
        part: this rank's shard of the parameter, or all of it.
        split: as `splits_of` has it, or None.
    """
    wanted = list(part.shape)
    if split is not None:
        wanted[split[0].dim] = split[0].size
    if list(whole.shape) != wanted:
        raise ValueError(
            f"{name} has shape {tuple(whole.shape)} in the state, and {tuple(wanted)} in the model"
        )
