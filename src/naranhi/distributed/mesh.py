"""A mesh of ranks: data, pipeline and tensor parallelism side by side in one world.

A rank has a place on the mesh, and with it a group for each parallelism: the ranks whose place
differs from its own in that one number. Ranks should be the nearer to each other, the more they
send in a step, and the less there is to do meanwhile:

    tensor    innermost: activations, four times in each block, and the next product waits for them
    data      next: the gradients of all that a stage keeps, once a step
    pipeline  outermost: an activation and a gradient for each micro-batch, from stage to stage,
              while other micro-batches are worked on

So with 8 ranks on a node, a tensor group of 8 is a node, one of 4 shares it with a replica, and a
pipeline goes from node to node. Megatron-LM (`initialize_model_parallel`) and DeepSpeed
(`PipeModelDataParallelTopology`) number their ranks in the same way. Why tensor parallelism belongs
inside a node: Narayanan et al., "Efficient large-scale language model training on GPU clusters
using Megatron-LM" (2021), section 3.
"""

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from naranhi.distributed.agreement import agree

AXES = "pipeline", "data", "tensor"  # from the outermost, whose neighbours may be far apart


class Place(NamedTuple):
    """A rank's number on each axis, from 0: which share of the batch, which stage, which shard."""

    data: int
    pipeline: int
    tensor: int


class Mesh:
    """`data` x `pipeline` x `tensor` ranks: all of the world.

        with Mesh(data=2, pipeline=2, tensor=2) as mesh:  # on each of 8 ranks
            Pipeline(layers, schedule, loss, group=mesh.pipeline, replicas=mesh.data)

    data: how many pipelines share the batch. pipeline: how many ranks each has, one after the
    other. tensor: how many ranks share each layer. Every rank of the world makes the mesh at the
    same time. Rank (pipeline x DATA + data) x TENSOR + tensor is at that place.

    Raises ValueError on every rank, and before any group is made: for a number that is no whole
    number of at least 1, for a mesh of more or fewer ranks than the world has, and where ranks
    were given other numbers.

    Attributes: the process groups of this rank, `data`, `pipeline` and `tensor`; `sizes` and
    `place`, two `Place`s; `device_mesh`, torch's own, for libraries that take one (its dimensions
    are named like the groups).
    """

    def __init__(self, data=1, pipeline=1, tensor=1):
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

    def __str__(self):
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes._asdict().items())

    def close(self):
        """Close the groups, when every rank is done with them."""
        for group in self.data, self.pipeline, self.tensor:  # in one order on all ranks
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
