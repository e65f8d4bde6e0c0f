"""Where each rank is on a mesh, and which part of a whole tensor it holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from naranhi.distributed import Mesh
from naranhi.tensor_parallel.shards import Split

ROWS = "data", "expert"  # the axes that divide the rows of a batch


class Part(NamedTuple):
    """A tensor of this rank, as a part of the tensor that one process has.

    Args:
        value: the tensor.
        slot: which part it is: ranks with equal slots hold the same part.
        cut: returns the part of a whole tensor.
    """

    value: torch.Tensor
    slot: Hashable
    cut: Callable[[torch.Tensor], torch.Tensor]


class Axes:
    """The coordinates of all ranks on a mesh.

    Args:
        mesh: a mesh of all ranks. Axes called "data" and "expert" divide the rows of a batch,
            one called "pipeline" the layers; any other may divide the layers or the sequence.

    Attributes:
        sizes: {axis: its size}, of the axes that have more than one rank.
        places: for each rank, {axis: its coordinate} on these axes.

    Raises:
        ValueError: the mesh has more or fewer ranks than the world, or an axis has no name.
    """

    sizes: dict[str, int]
    places: list[dict[str, int]]

    def __init__(self, mesh: Mesh | DeviceMesh) -> None:
        ranks, names = (mesh.device_mesh if isinstance(mesh, Mesh) else mesh), None
        names, table = ranks.mesh_dim_names, ranks.mesh
        if names is None or table.numel() != dist.get_world_size():
            raise ValueError(
                f"the finder needs a mesh of all {dist.get_world_size()} ranks whose axes have "
                f"names (mesh_dim_names), not one of {table.numel()} ranks with the axes {names}"
            )
        self.sizes = {name: size for name, size in zip(names, table.shape, strict=True) if size > 1}
        self.places = [{} for _ in range(table.numel())]
        for place in torch.cartesian_prod(*map(torch.arange, table.shape)).view(-1, table.dim()):
            coordinates = zip(names, place.tolist(), strict=True)
            rank = table[tuple(place)].item()
            self.places[rank] = {name: at for name, at in coordinates if name in self.sizes}

    @property
    def place(self) -> dict[str, int]:
        """Return this rank's coordinates."""
        return self.places[dist.get_rank()]

    def neighbours(self, *axes: str) -> list[list[int]]:
        """Return the lines of ranks along some axes; ranks in a line differ only on these axes."""
        lines = {}
        for rank, place in enumerate(self.places):
            rest = tuple((name, at) for name, at in place.items() if name not in axes)
            lines.setdefault(rest, []).append(rank)
        return list(lines.values())

    def where(self, rank: int) -> str:
        """Return a rank with its coordinates, such as "rank 3 (data 1, tensor 1)"."""
        coordinates = ", ".join(f"{name} {at}" for name, at in self.places[rank].items())
        return f"rank {rank}" + f" ({coordinates})" * bool(coordinates)

    def part_of_output(
        self,
        value: torch.Tensor,
        whole: torch.Size,
        rows: Sequence[int],
        by_rows: int,
        layer: nn.Module | None = None,
    ) -> Part:
        """Return a layer's output for some rows of the batch as a part of the whole tensor.

        A dimension shorter than the whole one is divided over the ranks of an axis: as the layer's
        own `splits` say, or else in contiguous parts (a sequence).

        Args:
            value: the tensor.
            whole: the shape of the same tensor in one process, for all rows of the batch.
            rows: the rows of the batch that this rank's micro-batch consists of.
            by_rows: how many rows of the batch each of one process's micro-batches has, if the
                whole tensor's first dimension is the batch; 0 if it is not.
            layer: the layer.

        Raises:
            ValueError: no axis explains the shape.
        """
        cuts, slot = [], []
        if value.dim() != len(whole):
            raise ValueError(
                f"a tensor has {value.dim()} dimensions here, shape {tuple(value.shape)}, and "
                f"{len(whole)} in one process, shape {tuple(whole)}"
            )
        if by_rows and len(value) == len(rows):
            index = torch.tensor(rows, dtype=torch.long)
            cuts.append(lambda tensor: tensor[index])
            slot.append(tuple(rows))
            whole = torch.Size((len(rows), *whole[1:]))
        elif by_rows:  # only by chance as long as a micro-batch: equal in each
            cuts.append(lambda tensor: tensor[:by_rows])
            whole = torch.Size((by_rows, *whole[1:]))
        taken = set()
        for dim in range(len(whole)):
            if value.shape[dim] == whole[dim]:
                continue
            split, at, axis = self._split(dim, value.shape[dim], whole, layer, taken)
            taken.add(axis)
            cuts.append(lambda tensor, split=split, at=at: split.shard(tensor, at))
            slot.append((dim, at))
            if split.parts == 1:  # leave out the padding
                each = value.shape[dim]
                valid = max(0, min(split.size - each * at, each))
                value = value.narrow(dim, 0, valid)
                cuts.append(lambda tensor, dim=dim, valid=valid: tensor.narrow(dim, 0, valid))

        def cut(tensor):
            for step in cuts:
                tensor = step(tensor)
            return tensor

        return Part(value, tuple(slot), cut)

    def _split(self, dim, length, whole, layer, taken):
        """Return how a dimension is divided, which part this rank has, and over which axis."""
        last = dim == len(whole) - 1  # which a layer's weights divide
        for own in getattr(layer, "splits", {}).values() if last else ():
            each = -(-own.size // (own.parts * own.ranks)) * own.parts
            if (own.size, each) == (whole[dim], length):
                return own._replace(dim=dim), layer.rank, None
        for axis, size in self.sizes.items():
            if axis not in (*ROWS, "pipeline", *taken) and -(-whole[dim] // size) == length:
                return Split(dim, whole[dim], size), self.place[axis], axis
        raise ValueError(
            f"dimension {dim} has {length} elements here and {whole[dim]} in one process: no "
            f"split over one of the axes {self.sizes} explains that"
        )
