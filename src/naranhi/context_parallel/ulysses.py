"""Ulysses: exchange sequence for heads, so each rank attends over all positions of some heads.

Source: Jacobs et al., "DeepSpeed Ulysses: system optimizations for enabling training of extreme
long sequence Transformer models" (2023).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from naranhi import collectives
from naranhi.autograd.autocast import as_autocast
from naranhi.context_parallel.arguments import Cut, is_a_shape, prepare
from naranhi.context_parallel.order import by_rank, in_sequence
from naranhi.context_parallel.partial_attention import Partial, add_gradients
from naranhi.context_parallel.tiles import Documents

SEQUENCE = -2  # the dimension


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    *,
    order: str = "plain",
    documents: Documents | None = None,
    positions: torch.Tensor | None = None,
    scale: float | None = None,
    check: bool = True,
) -> torch.Tensor:
    """Return the attention of this rank's queries to the keys of the whole sequence.

    Two all-to-alls each way: queries, keys and values go to the ranks of their heads, the output
    comes back. With a causal mask, every rank computes the same amount in either order.

    Arguments, result and errors are those of `ring_attention`.

    Raises:
        ValueError: also if the ranks do not divide the key-value heads.
    """
    query, key, value = as_autocast(query, key, value)
    if is_a_shape(query):
        return query.clone()
    cut = prepare(
        query,
        key,
        value,
        group,
        causal,
        heads_over_ranks=True,
        order=order,
        documents=documents,
        positions=positions,
        scale=scale,
        check=check,
    )
    return UlyssesFunction.apply(query, key, value, cut)


class UlyssesFunction(Function):
    """Attention of some heads to the whole sequence, forward and backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cut: Cut
    ) -> torch.Tensor:
        """Exchange, attend, and exchange back."""
        queries = query.unflatten(1, (key.shape[1], -1))
        whole = to_heads(torch.cat([queries, key.unsqueeze(2), value.unsqueeze(2)], 2), cut)
        queries, block = _parts(whole)
        partial = Partial(queries, cut.scale)
        partial.add(block, cut.tiles_of_heads())
        output = partial.output.to(query.dtype)
        ctx.save_for_backward(whole, output, partial.lse)
        ctx.cut = cut
        return to_sequence(output, cut).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Exchange the output's gradients, and exchange back those of the three tensors."""
        whole, output, lse = ctx.saved_tensors
        cut = ctx.cut
        grad_output = to_heads(grad_output.unflatten(1, (-1, output.shape[2])), cut)
        to_whole = torch.zeros_like(whole, dtype=lse.dtype)
        add_gradients(
            _parts(to_whole),
            grad_output,
            *_parts(whole),
            output,
            lse,
            cut.tiles_of_heads(),
            cut.scale,
        )
        to_query, block = _parts(to_sequence(to_whole.to(whole.dtype), cut))
        to_key, to_value = (side.squeeze(2) for side in block)
        return to_query.flatten(1, 2), to_key, to_value, None


def to_heads(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Exchange heads for sequence, by one all-to-all.

    Args:
        x: (batch, kv heads, any, sequence of this rank, head size).
        cut: how the sequence is cut.

    Returns:
        (batch, kv heads / ranks, any, whole sequence, head size).
    """
    sent = x.unflatten(1, (cut.ranks, -1)).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    collectives.all_to_all(received, sent, cut.group)
    return in_sequence(list(received), cut.order, SEQUENCE)


def to_sequence(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Exchange sequence for heads: the inverse of `to_heads`."""
    sent = by_rank(x, cut.ranks, cut.order, SEQUENCE)
    received = torch.empty_like(sent)
    collectives.all_to_all(received, sent, cut.group)
    return received.movedim(0, 1).flatten(1, 2)


def _parts(whole):
    """Return (queries, (keys, values)), views of the tensor that is exchanged."""
    return whole[:, :, :-2], (whole[:, :, -2:-1], whole[:, :, -1:])
