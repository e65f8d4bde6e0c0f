"""A mesh of ranks: up to five parallelisms side by side in one world.

A rank has a coordinate on the mesh, and a process group for each axis: the ranks whose coordinates
differ from its own on that axis only. Place ranks that exchange the most data, with the least
computation to hide it, closest together:

    tensor    innermost: activations, four times in each block, and the next product waits for them
    context   keys and values of each block, while blocks of attention are computed
    expert    tokens, four times in each layer of experts, and the experts wait for them
    data      next: the gradients of all parameters of a stage, once a step
    pipeline  outermost: an activation and a gradient for each micro-batch, from stage to stage,
              while other micro-batches are computed

So with 8 ranks on a node, a tensor group of 8 fills a node, a tensor group of 4 shares its node
with a replica, and a pipeline goes from node to node. Megatron-LM (`initialize_model_parallel`,
whose order is "tp-cp-ep-dp-pp") and DeepSpeed (`PipeModelDataParallelTopology`) number their ranks
in the same order.

The batch is divided over data and expert, each sequence over context. So the ranks along data,
expert and context hold the same norms, attention and routers, but process different tokens: they
are `replicas`. The ranks along data, context and tensor hold the same experts, but process
different tokens: they are `expert_replicas`.

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM" (2021), section 3, on why tensor parallelism belongs inside a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from naranhi.distributed.agreement import agree
from naranhi.distributed.backends import device_of

AXES = "pipeline", "data", "expert", "context", "tensor"  # the outermost may be far apart


class Place(NamedTuple):
    """A rank's coordinate on each axis, from 0: share of the batch, stage, shard, and so on."""

    data: int
    pipeline: int
    tensor: int
    context: int = 0
    expert: int = 0


class Mesh:
    """A mesh of `data` x `pipeline` x `tensor` x `context` x `expert` ranks, all of the world.

        with Mesh(data=2, pipeline=2, tensor=2) as mesh:  # on each of 8 ranks
            Pipeline(layers, schedule, loss, group=mesh.pipeline, replicas=mesh.replicas)

    Every rank of the world makes the mesh at the same time. Rank
    (((pipeline x DATA + data) x EXPERT + expert) x CONTEXT + context) x TENSOR + tensor has the
    coordinate (data, pipeline, tensor, context, expert), where the sizes are in capitals.

    Args:
        data: the number of pipelines that share the batch, each with all experts.
        pipeline: the number of ranks of each pipeline, one after the other.
        tensor: the number of ranks that share each layer.
        context: the number of ranks that share each sequence.
        expert: the number of ranks that share the experts; they share the batch as well.

    Attributes:
        data, pipeline, tensor, context, expert: this rank's process group on each axis.
        replicas: the group of the ranks that hold the same layers but process different tokens:
            along data, expert and context.
        expert_replicas: the group of the ranks that hold the same experts but process different
            tokens: along data, context and tensor.
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
    context: dist.ProcessGroup
    expert: dist.ProcessGroup
    replicas: dist.ProcessGroup
    expert_replicas: dist.ProcessGroup
    sizes: Place
    place: Place
    device_mesh: DeviceMesh

    def __init__(
        self,
        data: int = 1,
        pipeline: int = 1,
        tensor: int = 1,
        context: int = 1,
        expert: int = 1,
    ):
        self.sizes = Place(data, pipeline, tensor, context, expert)
        agree(size_of_the_mesh=str(self), sizes=repr(self.sizes))  # the first has none of 1
        for axis, size in self.sizes._asdict().items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis} must be a whole number of at least 1, not {size!r}")
        ranks, world = prod(self.sizes), dist.get_world_size()
        if ranks != world:
            raise ValueError(f"a mesh of {self} has {ranks} ranks, the world has {world}")
        self.device_mesh = init_device_mesh(
            device_of().type, [getattr(self.sizes, axis) for axis in AXES], mesh_dim_names=AXES
        )
        for axis in Place._fields:
            setattr(self, axis, self.device_mesh.get_group(axis))
        self.place = Place(*map(self.device_mesh.get_local_rank, Place._fields))
        self.replicas = self._along(("data", "expert", "context"))
        self.expert_replicas = self._along(("data", "context", "tensor"))

    def __str__(self) -> str:
        sizes = self.sizes._asdict().items()
        always = "data", "pipeline", "tensor"
        return " x ".join(f"{axis} {size}" for axis, size in sizes if size != 1 or axis in always)

    def _along(self, axes: Sequence[str]) -> dist.ProcessGroup:
        """Return this rank's group of the ranks that differ on these axes only."""
        longer = [axis for axis in axes if getattr(self.sizes, axis) > 1] or axes[:1]
        if len(longer) == 1:
            return getattr(self, longer[0])
        table = torch.arange(prod(self.sizes)).view(self.device_mesh.mesh.shape)
        dims = [AXES.index(axis) for axis in longer]
        table = table.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        group, _ = dist.new_subgroups_by_enumeration(table.flatten(0, -2).tolist())
        return group

    def close(self) -> None:
        """Destroy the groups that are left; call this when every rank is done with them."""
        left = dist.distributed_c10d._world.pg_map
        groups = [getattr(self, axis) for axis in Place._fields]
        for group in dict.fromkeys([*groups, self.replicas, self.expert_replicas]):
            if group in left and group is not dist.group.WORLD:  # in the same order on all ranks
                dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
