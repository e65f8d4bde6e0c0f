"""Which part of a parameter a rank of a tensor group holds; whole models cut up and put together.

A layer that holds parts of parameters says so in `splits`, {name of a parameter: Split}, beside
`group`. What is not in it, a rank holds whole, as the other ranks do.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from naranhi.tensor_parallel.mappings import start_gather


class Split(NamedTuple):
    """How a tensor is cut: along `dim`, which is `size` long, among `ranks`.

    parts: how many tensors lie there one after the other, such as the 3 of queries, keys and
    values; each of them is cut, so that a rank has some of each. What the ranks do not divide is
    filled up with zeros, at the end.
    """

    dim: int
    size: int
    ranks: int
    parts: int = 1

    def shard(self, whole, rank):
        """A copy of the part of `whole` that is this rank's."""
        each = -(-self.size // (self.parts * self.ranks))  # of a part, rounded up
        pieces = []
        for part in whole.tensor_split(self.parts, self.dim):
            piece = part.tensor_split([each * rank, each * (rank + 1)], self.dim)[1]
            missing = list(piece.shape)
            missing[self.dim] = each - piece.shape[self.dim]
            pieces += [piece, piece.new_zeros(missing)]
        return torch.cat(pieces, self.dim)

    def join(self, shards):
        """The whole of the ranks' shards: the inverse of `shard`."""
        pieces = zip(*(one.chunk(self.parts, self.dim) for one in shards), strict=True)
        whole = torch.cat([piece for part in pieces for piece in part], self.dim)
        return whole.narrow(self.dim, 0, self.size)


class ShardedModule(nn.Module):
    """A layer of which this rank of `group` holds a part.

    sequence: whether activations outside are split along the sequence (sequence parallelism).
    """

    def __init__(self, group, sequence=False):
        super().__init__()
        self.group, self.sequence = group, sequence
        self.rank, self.ranks, self.splits = dist.get_rank(group), dist.get_world_size(group), {}

    def take(self, name, whole, split=None):
        """Make a parameter of this rank's part of `whole`, a parameter or None; all of it where it
        is not split."""
        if whole is not None and split:
            self.splits[name] = split
            shard = split.shard(whole.detach(), self.rank)
            whole = nn.Parameter(shard, requires_grad=whole.requires_grad)
        self.register_parameter(name, whole)


def as_module(model):
    """A module as it is; of a list of layers a module, with the layers' numbers as names."""
    return model if isinstance(model, nn.Module) else nn.ModuleList(model)


def _splits(model):
    """{name in the state_dict: (Split, group)} of all that is split."""
    split_of = {
        id(getattr(module, name)): (split, module.group)
        for module in model.modules()
        if isinstance(module, ShardedModule)
        for name, split in module.splits.items()
    }
    state = model.state_dict(keep_vars=True)
    return {name: split_of[id(param)] for name, param in state.items() if id(param) in split_of}


@torch.no_grad()
def full_state_dict(model):
    """The state_dict of the unsplit model, on every rank: parts gathered, padding stripped.

    model: a module, or a list of layers, that was given to `parallelize`, or some of its layers;
    every rank of the tensor group calls this with the same ones.
    """
    model = as_module(model)
    splits, state, done = _splits(model), dict(model.state_dict()), {}
    for name, (split, group) in splits.items():
        shard = state[name]
        if shard.data_ptr() not in done:  # a tied parameter has two names
            pieces = start_gather(shard, group, split.dim)().chunk(split.ranks, split.dim)
            done[shard.data_ptr()] = split.join(pieces)
        state[name] = done[shard.data_ptr()]
    return state


@torch.no_grad()
def load_full_state_dict(model, state):
    """Load the state_dict of an unsplit model: each rank takes its parts of it.

    Raises ValueError, before anything is changed, for a name that is missing or not known, and
    for a tensor of another shape than the unsplit model's.
    """
    model = as_module(model)
    splits, own = _splits(model), model.state_dict()
    if state.keys() != own.keys():
        name = sorted(state.keys() ^ own.keys())[0]
        raise ValueError(f"{name} is in the {'model' if name in own else 'state'} only")
    for name, mine in own.items():
        wanted = list(mine.shape)
        if name in splits:
            wanted[splits[name][0].dim] = splits[name][0].size
        if list(state[name].shape) != wanted:
            raise ValueError(
                f"{name} has shape {tuple(state[name].shape)} in the state, and "
                f"{tuple(wanted)} in the model"
            )
    for name, mine in own.items():
        whole = state[name]
        if name in splits:
            split, group = splits[name]
            whole = split.shard(whole, dist.get_rank(group))
        mine.copy_(whole)
