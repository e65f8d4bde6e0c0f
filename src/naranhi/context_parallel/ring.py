"""Ring attention: blocks of keys and values go round the ranks, each of which keeps its queries.

Source: Liu, Zaharia and Abbeel, "Ring attention with blockwise Transformers for near-infinite
context" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from naranhi.autograd.autocast import as_autocast
from naranhi.collectives import chunks
from naranhi.context_parallel.arguments import Cut, is_a_shape, prepare
from naranhi.context_parallel.partial_attention import Partial, add_gradients, fold
from naranhi.context_parallel.tiles import Documents


def ring_attention(
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

    Each block of keys and values visits every rank in ranks - 1 steps, and travels on while the
    rank computes with it. Masked tiles are not computed, but every block is sent.

    Args:
        query: (batch, heads, sequence of this rank, head size).
        key: (batch, key-value heads, sequence of this rank, head size). With fewer key-value heads
            than heads, consecutive heads share one (grouped-query attention).
        value: as `key`.
        group: the ranks that share the sequence; None for the default group.
        causal: whether a query sees no key after its own position.
        order: which positions a rank has, "plain" or "head_tail" (see `split_sequence`).
        documents: lengths of the documents in the whole sequence, in its own order: one list for
            all rows, or one for each row. A query sees the keys of its own document only.
        positions: the positions of this rank's tokens; if given, they are checked against `order`.
        scale: the factor by which scores are multiplied, above 0; None for 1 / sqrt(head size).
        check: whether the ranks compare their arguments first, in a small exchange. Without it,
            ranks with different arguments hang or return wrong results: pass False only where an
            earlier layer has compared the arguments.

    Returns:
        A tensor of the query's shape, in the tensors' dtype, or in autocast's if it casts.
        Gradients flow to all three tensors; second derivatives are not supported.

    Raises:
        ValueError: before any block is sent, and with `check` on every rank: shapes, dtypes or
            devices do not match; the heads are not a multiple of the key-value heads; the order is
            unknown, or cannot halve an odd length; documents do not sum to the sequence; positions
            are not those of the order; `scale` is not positive; or ranks' arguments differ.
        TypeError: the dtype is not floating point; with `check` on several ranks, a ValueError.
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
        order=order,
        documents=documents,
        positions=positions,
        scale=scale,
        check=check,
    )
    return RingFunction.apply(query, key, value, cut)


def around(block: torch.Tensor, cut: Cut) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (owner, block) for every rank's block, this rank's first.

    A block travels on to the right neighbour while the caller computes with it.
    """
    left, right = (cut.rank - 1) % cut.ranks, (cut.rank + 1) % cut.ranks
    for step in range(cut.ranks - 1):
        arriving = torch.empty_like(block)
        works = chunks.start(cut.group, sends=[(block, right)], receives=[(arriving, left)])
        yield (cut.rank - step) % cut.ranks, block
        chunks.finish(works)
        block = arriving
    yield right, block


class RingFunction(Function):
    """Ring attention, forward and backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cut: Cut
    ) -> torch.Tensor:
        """Attend to each block as it arrives, and merge the results."""
        queries, own = fold(query, key, value)
        partial = Partial(queries, cut.scale)
        for owner, block in around(own, cut):
            partial.add(block, cut.tiles(owner))
        output = partial.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, partial.lse)
        ctx.cut = cut
        return output.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send the blocks round again, and sum each block's gradients on the way to its owner."""
        query, key, value, output, lse = ctx.saved_tensors
        cut = ctx.cut
        queries, own = fold(query, key, value)
        grad_output = grad_output.reshape(queries.shape)
        left, right = (cut.rank - 1) % cut.ranks, (cut.rank + 1) % cut.ranks
        to_queries, to_own = (torch.zeros_like(x, dtype=lse.dtype) for x in (queries, own))
        arriving, works = None, []
        for owner, block in around(own, cut):
            grad = to_own if owner == cut.rank else torch.zeros_like(to_own)
            add_gradients(
                (to_queries, grad),
                grad_output,
                queries,
                block,
                output,
                lse,
                cut.tiles(owner),
                cut.scale,
            )
            if owner == cut.rank:
                continue  # the sum that comes home last has what the other ranks add
            chunks.finish(works)
            if arriving is not None:  # from the ranks that had this block before
                grad += arriving
            leaving, arriving = grad, torch.empty_like(grad)
            works = chunks.start(cut.group, sends=[(leaving, right)], receives=[(arriving, left)])
        chunks.finish(works)
        if arriving is not None:
            to_own += arriving
        to_key, to_value = to_own.squeeze(3).to(key.dtype)
        return to_queries.flatten(1, 2).to(query.dtype), to_key, to_value, None
