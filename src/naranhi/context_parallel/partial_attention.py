"""Attention to some of the keys, and the merge of partial results by their log-sum-exp.

For one query, attention to keys A and B together follows from attention to A and to B:

    lse = log(exp(lse_A) + exp(lse_B))        output = w output_A + (1 - w) output_B
                                              w = exp(lse_A - lse) = sigmoid(lse_A - lse_B)

where lse is the logarithm of the sum of exponentials of the scores. The backward needs no merge:
the lse and the output over all keys determine each block's gradients separately; the gradients of
the queries are summed over the blocks.

Here the query heads that share a key-value head have a separate dimension: queries and outputs are
(batch, kv heads, query heads per kv head, sequence, head size), and a block of keys and values is
(2, batch, kv heads, 1, sequence, head size). No key or value is repeated in memory.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the merge;
Dao et al., "FlashAttention" (2022), for the backward from output and lse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from naranhi.context_parallel import fused
from naranhi.context_parallel.tiles import Tile


def fold(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group queries by key-value head, and stack keys and values; all detached.

    Args:
        query: (batch, heads, sequence, head size).
        key: (batch, kv heads, sequence, head size).
        value: as `key`.

    Returns:
        (batch, kv heads, heads / kv heads, sequence, head size), and (2, batch, kv heads, 1,
        sequence, head size).
    """
    query = query.detach().contiguous().unflatten(1, (key.shape[1], -1))
    return query, torch.stack([key.detach(), value.detach()]).unsqueeze(3)


class Partial:
    """The attention of queries to the keys that have been added so far.

    Args:
        query: the queries, as `fold` returns them.
        scale: the factor by which scores are multiplied.
    """

    query: torch.Tensor
    scale: float
    output: torch.Tensor
    lse: torch.Tensor

    def __init__(self, query: torch.Tensor, scale: float):
        self.query, self.scale = query, scale
        exact = query.dtype if query.dtype == torch.float64 else torch.float32
        self.output = torch.zeros_like(query, dtype=exact)
        self.lse = query.new_full(query.shape[:-1], -torch.inf, dtype=exact)

    def add(self, block: torch.Tensor, tiles: Sequence[Tile]) -> None:
        """Attend to a block of keys and values, folded, where tiles say so, and merge."""
        for tile in tiles:
            at = tile.rows, slice(None), slice(None), tile.queries
            query, key, value = _cut(self.query, block, tile)
            output, lse = fused.forward(query, key, value, tile.causal, self.scale)
            merge(self.output[at], self.lse[at], output, lse)


def merge(
    output: torch.Tensor, lse: torch.Tensor, new_output: torch.Tensor, new_lse: torch.Tensor
) -> None:
    """Merge the attention to further keys into `output` and `lse`, in place.

    The lse of a query that has seen no key is -inf.
    """
    new_lse = new_lse.view_as(lse)
    weight = torch.sigmoid(new_lse - lse)
    output.lerp_(new_output.view_as(output).to(output.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def add_gradients(
    grads: tuple[torch.Tensor, torch.Tensor],
    grad_output: torch.Tensor,
    query: torch.Tensor,
    block: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    tiles: Sequence[Tile],
    scale: float,
) -> None:
    """Add the gradients that come from a block of keys and values, in place.

    Args:
        grads: the gradients of the queries and of the block, updated in place.
        grad_output: the gradient of the output.
        query: the queries.
        block: the block of keys and values.
        output: the output over all keys, not only those of the block.
        lse: the lse over all keys.
        tiles: which queries see which keys of the block.
        scale: the factor by which scores are multiplied.
    """
    to_query, to_block = grads
    for tile in tiles:
        at = tile.rows, slice(None), slice(None), tile.queries
        tile_grads = fused.backward(
            grad_output[at].flatten(0, 1),
            *_cut(query, block, tile),
            output[at].flatten(0, 1),
            lse[at].flatten(0, 1),
            tile.causal,
            scale,
        )
        to_query[at] += tile_grads[0].view_as(to_query[at])
        for side, grad in zip(to_block, tile_grads[1:], strict=True):
            part = side[tile.rows, :, :, tile.keys]
            part += grad.sum(1).view_as(part)


def _cut(query, block, tile):
    """Return a tile's queries, keys and values, (rows x kv heads, heads per kv head, ...)."""
    query = query[tile.rows, :, :, tile.queries].flatten(0, 1)
    sides = (side[tile.rows, :, :, tile.keys].flatten(0, 1) for side in block)
    return query, *(side.expand(-1, query.shape[1], -1, -1) for side in sides)
