"""A matrix product for each expert, over one buffer in which the rows of an expert are adjacent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Multiply the first `sizes[0]` rows by `weights[0]`, the next `sizes[1]` by `weights[1]`, ...

    No row is padded or copied, and an expert may have no rows. (torch's own
    `nn.functional.grouped_mm` computes the same, but not in float64.)

    Args:
        rows: (rows, inputs), sorted by expert.
        weights: (experts, inputs, outputs).
        sizes: the number of rows of each expert; their sum is the number of rows.

    Raises:
        ValueError: the sizes do not sum to the rows, or are not one per expert.
    """
    if sum(sizes) != len(rows) or len(sizes) != len(weights):
        raise ValueError(
            f"{len(sizes)} sizes for {len(weights)} weights, with a sum of {sum(sizes)} for "
            f"{len(rows)} rows: the numbers must be equal in both cases"
        )
    return GroupedProduct.apply(rows, weights, sizes)


class GroupedProduct(Function):
    """One product for each expert, written into one buffer, in the forward and in the backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """Return the products, (rows, outputs)."""
        ctx.save_for_backward(rows, weights)
        ctx.sizes = sizes
        output = rows.new_empty(len(rows), weights.shape[-1])
        for own, weight, product in _by_expert(sizes, rows, weights, output):
            torch.mm(own, weight, out=product)
        return output

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Return the gradients of rows and weights; a weight without rows has zeros."""
        rows, weights = ctx.saved_tensors
        to_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        to_weights = torch.empty_like(weights) if ctx.needs_input_grad[1] else None
        if to_rows is not None:
            for given, weight, result in _by_expert(ctx.sizes, gradient, weights, to_rows):
                torch.mm(given, weight.t(), out=result)
        if to_weights is not None:
            for own, result, given in _by_expert(ctx.sizes, rows, to_weights, gradient):
                torch.mm(own.t(), given, out=result)  # zeros without rows
        return to_rows, to_weights, None


def _by_expert(sizes, rows, weights, others):
    """Return (rows, weight, other rows) of each expert."""
    return zip(rows.split(sizes), weights.unbind(), others.split(sizes), strict=True)
