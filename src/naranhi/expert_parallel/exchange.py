"""An all-to-all whose blocks differ in size: rows of a buffer, to and from each rank of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import FunctionCtx


def exchange_rows(
    rows: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Send the first `sent[0]` rows to rank 0, the next `sent[1]` to rank 1, and so on.

    The backward sends gradients the other way. A rank that neither sends nor receives a row must
    still call this function, and run its backward.

    Args:
        rows: (rows, ...), of the same dtype and the same trailing sizes on every rank.
        sent: the number of rows for each rank of the group; their sum is the number of rows.
        received: the number of rows from each rank of the group, which is what that rank sends.
        group: the process group; None for the default one.

    Returns:
        The rows of rank 0, then those of rank 1, and so on.

    Raises:
        ValueError: `sent` does not sum to the number of rows, or a list does not have one number
            per rank; raised before anything is sent.
    """
    ranks = dist.get_world_size(group)
    if sum(sent) != len(rows) or not len(sent) == len(received) == ranks:
        raise ValueError(
            f"sent and received must have a number for each of {ranks} ranks, and sent must sum to "
            f"{len(rows)} rows: sent is {list(sent)}, received {list(received)}"
        )
    return rows if ranks == 1 else ExchangeFunction.apply(rows, sent, received, group)


class ExchangeFunction(Function):
    """An all-to-all of uneven blocks in the forward, and its inverse in the backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Return the rows that arrive, in the order of their senders."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), list(received), list(sent), group)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradients of the rows that left, in their order."""
        return exchange_rows(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def reorder(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `rows[order]` for a permutation; the backward inverts it, and needs no sums.

    Args:
        rows: (rows, ...).
        order: each row's index once, on the CPU; if it is 0, 1, 2, ... nothing is copied.
    """
    if torch.equal(order, torch.arange(len(order), device="cpu")):
        return rows
    return _Reorder.apply(rows, order.to(rows.device))


class _Reorder(Function):
    @staticmethod
    def forward(ctx, rows, order):
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient):
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order.argsort()), None
