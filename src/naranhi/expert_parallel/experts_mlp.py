"""A mixture of experts in place of a block's MLP, with its auxiliary loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from naranhi.distributed.shared_groups import SharesGroups
from naranhi.expert_parallel.moe import MoE
from naranhi.tensor_parallel.mappings import gather_from_group, scatter_to_group
from naranhi.tensor_parallel.sequence_gradients import mark_sequence_module


class ExpertsMLP(SharesGroups, nn.Module):
    """A mixture of experts in place of a block's MLP.

    Args:
        moe: the mixture of experts.
        coefficient: the factor of the auxiliary loss if the layer itself adds it to the model's
            loss, as the stages of a pipeline and recomputed blocks need; None if the caller adds
            `auxiliary_loss` instead. The backward does not see a scale of the loss: see the
            attribute.
        tensor: a tensor group, whose ranks have the same tokens; each sends its part of the
            sequence to the experts. None without such a group, or if tokens are already split.

    Attributes:
        coefficient: read in each forward. With a scaled loss (`precision.LossScaler`, with its
            `finite` all-reduced; not `torch.amp.GradScaler`: see `tensor_parallel.parallelize`),
            set it before each step to the coefficient x the scale, in all these layers; otherwise
            unscaling makes the gradient of the auxiliary loss too small.
        auxiliary: the auxiliary loss of the last forward.
    """

    moe: MoE
    coefficient: float | None
    tensor: dist.ProcessGroup | None
    auxiliary: torch.Tensor | None

    def __init__(
        self,
        moe: MoE,
        *,
        coefficient: float | None = None,
        tensor: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.moe, self.coefficient, self.tensor, self.auxiliary = moe, coefficient, tensor, None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without the last loss, which has a graph."""
        return self.__dict__ | {"auxiliary": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of all tokens, (batch, sequence, hidden) in and out."""
        own = scatter_to_group(x, self.tensor, dim=-2) if self.tensor else x
        output, auxiliary = self.moe(own.flatten(0, -2))
        if self.coefficient is not None:
            output = AddedLoss.apply(output, auxiliary, self.coefficient)
            auxiliary = auxiliary.detach()
        self.auxiliary, output = auxiliary, output.view_as(own)
        return gather_from_group(output, self.tensor, dim=-2) if self.tensor else output


class AddedLoss(Function):
    """The identity, whose backward acts as if `coefficient` x `auxiliary` were part of the loss."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, auxiliary: torch.Tensor, coefficient: float
    ) -> torch.Tensor:
        """Return x unchanged."""
        ctx.gradient = torch.full_like(auxiliary, coefficient)
        return x.view_as(x)

    @staticmethod
    def backward(
        ctx: FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradient unchanged, and the coefficient."""
        return gradient, ctx.gradient, None


def in_place_of_mlp(
    moe: MoE,
    coefficient: float | None,
    tensor: dist.ProcessGroup | None,
    sequence: bool,
) -> ExpertsMLP:
    """Return the mixture as the MLP of a block that `tensor_parallel.parallelize` will split.

    Args:
        moe: the mixture of experts.
        coefficient: see `ExpertsMLP`.
        tensor: the tensor group, or None without one. Each rank has the router's gradient
            of its own tokens only, which `tensor_parallel.sum_sequence_gradients` sums.
        sequence: whether activations will be split, too.
    """
    if tensor:
        mark_sequence_module(moe.router, tensor)
    return ExpertsMLP(moe, coefficient=coefficient, tensor=None if sequence else tensor)


def require_copies_on(
    tensor: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the tensor group, or None if it has one rank.

    Raises:
        ValueError: `replicas` lacks ranks of the tensor group.
    """
    if not tensor or dist.get_world_size(tensor) == 1:
        return None
    copies = dist.get_process_group_ranks(replicas) if replicas else []
    if not {*dist.get_process_group_ranks(tensor)} <= {*copies}:
        raise ValueError(
            "the ranks of the tensor group have copies of the experts and different tokens: "
            "`replicas` must include these ranks, as Mesh.expert_replicas does"
        )
    return tensor


def auxiliary_loss(model: nn.Module) -> torch.Tensor:
    """Return the layers' summed auxiliary losses of the last forward, the same on every rank.

    Args:
        model: a module made of the layers that `add_experts` or `divide_experts` returned.

    Raises:
        RuntimeError: there has been no forward, or no layer has experts; or routers are trained by
            this loss, and the forward had no graph, as in a recomputed block.
    """
    mlps = [module for module in model.modules() if isinstance(module, ExpertsMLP)]
    if not mlps or any(mlp.auxiliary is None for mlp in mlps):
        raise RuntimeError("no auxiliary loss: the model has no experts, or has had no forward")
    for mlp in mlps:
        trained = mlp.coefficient is None and mlp.moe.router.weight.requires_grad
        if trained and torch.is_grad_enabled() and not mlp.auxiliary.requires_grad:
            raise RuntimeError(
                "the auxiliary loss has no graph, so routers would get no gradient from it: it was "
                "computed in the first forward of a recomputed block, or under no_grad(); pass "
                "coefficient= to add_experts or divide_experts, or, only to read it, call "
                "auxiliary_loss under no_grad()"
            )
    return torch.stack([mlp.auxiliary for mlp in mlps]).sum()
