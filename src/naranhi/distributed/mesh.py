"""A mesh of ranks: data, pipeline and tensor parallelism side by side in one world.

A rank has a coordinate on the mesh, and a process group for each axis: the ranks whose coordinates
differ from its own on that axis only. Place ranks that exchange the most data, with the least
computation to hide it, closest together:

    tensor    innermost: activations, four times in each block, and the next product waits for them
    data      next: the gradients of all parameters of a stage, once a step
    pipeline  outermost: an activation and a gradient for each micro-batch, from stage to stage,
              while other micro-batches are computed

So with 8 ranks on a node, a tensor group of 8 fills a node, a tensor group of 4 shares its node
with a replica, and a pipeline goes from node to node. Megatron-LM (`initialize_model_parallel`) and
DeepSpeed (`PipeModelDataParallelTopology`) number their ranks in the same order.

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM" (2021), section 3, on why tensor parallelism belongs inside a node.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from naranhi.distributed.agreement import agree

AXES = "pipeline", "data", "tensor"  # outermost first: its neighbours may be far apart


class Place(NamedTuple):
    """A rank's coordinate on each axis, from 0: its share of the batch, its stage, its shard."""

    data: int
    pipeline: int
    tensor: int


class Mesh:
    """A mesh of `data` x `pipeline` x `tensor` ranks, which are all ranks of the world.

        with Mesh(data=2, pipeline=2, tensor=2) as mesh:  # on each of 8 ranks
            Pipeline(layers, schedule, loss, group=mesh.pipeline, replicas=mesh.data)

    Every rank of the world makes the mesh at the same time. On a mesh of DATA x PIPELINE x TENSOR
    ranks, rank (pipeline x DATA + data) x TENSOR + tensor has the coordinate (data, pipeline,
    tensor).

    Args:
        data: the number of pipelines, which share the batch.
        pipeline: the number of ranks of each pipeline, one after the other.
        tensor: the number of ranks that share each layer.

    Attributes:
        data, pipeline, tensor: this rank's process group on each axis.
        sizes: the size of each axis, a `Place`.
        place: this rank's coordinate, a `Place`.
        device_mesh: torch's own mesh, for libraries that need one; its dimensions are named like
            the groups.

    Raises:
        ValueError: a size is not a whole number of at least 1, the mesh has more or fewer ranks
            than the world, or ranks passed different sizes; raised on every rank, before any group
            is made.
    """

    data: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    tensor: dist.ProcessGroup
    sizes: Place
    place: Place
    device_mesh: DeviceMesh

    def __init__(self, data: int = 1, pipeline: int = 1, tensor: int = 1):
        self.sizes = Place(data, pipeline, tensor)
        agree(size_of_the_mesh=str(self))
        ranks, world = 1, dist.get_world_size()
        for axis, size in self.sizes._asdict().items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis} must be a whole number of at least 1, not {size!r}")
            ranks *= size
        if ranks != world:
            raise ValueError(f"a mesh of {self} has {ranks} ranks, the world has {world}")
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self.device_mesh = init_device_mesh(
            device, [getattr(self.sizes, axis) for axis in AXES], mesh_dim_names=AXES
        )
        self.data, self.pipeline, self.tensor = map(self.device_mesh.get_group, Place._fields)
        self.place = Place(*map(self.device_mesh.get_local_rank, Place._fields))

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes._asdict().items())

    def close(self) -> None:
        """Destroy the groups; call this when every rank is done with them."""
        for group in self.data, self.pipeline, self.tensor:  # in the same order on all ranks
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
