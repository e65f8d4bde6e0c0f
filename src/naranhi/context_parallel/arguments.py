"""The arguments that the three kinds of attention share, checked before any block is sent."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from naranhi.collectives.arguments import expect, locate
from naranhi.context_parallel.order import Run, runs
from naranhi.context_parallel.tiles import Documents, Tile, spans, tiles
from naranhi.distributed import agree, device_of, raise_on_all


@dataclass(frozen=True)
class Cut:
    """A sequence cut over the ranks of a group, and its mask.

    Attributes:
        group: the process group.
        rank: this rank in the group.
        ranks: the number of ranks.
        length: the number of positions on each rank.
        order: "plain" or "head_tail".
        causal: whether a query sees no key after its own position.
        documents: what `tiles.spans` returns.
        scale: the factor by which scores are multiplied.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    length: int
    order: str
    causal: bool
    documents: list[tuple[slice, list[tuple[int, int]]]]
    scale: float

    def tiles(self, owner: int | None) -> list[Tile]:
        """Return the tiles of this rank's queries and rank `owner`'s keys; for None, all keys."""
        own = runs(self.order, self.ranks, self.rank, self.length)
        keys = runs(self.order, self.ranks, owner, self.length) if owner is not None else self.whole
        return tiles(own, keys, self.causal, self.documents)

    def tiles_of_heads(self) -> list[Tile]:
        """Return the tiles of the whole sequence's queries and keys."""
        return tiles(self.whole, self.whole, self.causal, self.documents)

    @property
    def whole(self) -> list[Run]:
        """The whole sequence in its own order."""
        return [Run(0, self.ranks * self.length, 0)]


def prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup | None,
    causal: bool,
    *,
    heads_over_ranks: bool = False,
    order: str,
    documents: Documents | None,
    positions: torch.Tensor | None,
    scale: float | None,
    check: bool,
) -> Cut:
    """Return how the sequence is cut and masked.

    With `check`, the ranks compare their arguments, and an error on one rank is raised on all.

    Raises:
        ValueError: as `ring_attention`.
        TypeError: as `ring_attention`.
    """
    group, rank, ranks = locate(group)

    def cut():
        _require_shapes(query, key, value)
        heads, kv_heads, length = query.shape[1], key.shape[1], query.shape[2]
        if heads_over_ranks and kv_heads % ranks:
            raise ValueError(
                f"{ranks} ranks do not divide {kv_heads} key-value heads (of {heads} heads): take "
                "ring_attention or gathered_attention, or fewer ranks"
            )
        own = runs(order, ranks, rank, length)
        _require_positions(positions, own, order)
        masks = spans(documents, len(query), ranks * length)
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        if not 0 < factor < math.inf:  # torch's kernel multiplies masked scores, -inf, by it
            raise ValueError(f"scale must be a positive number, not {scale}")
        return Cut(group, rank, ranks, length, order, causal, masks, factor)

    if not check or ranks == 1:
        return cut()
    things = {
        "query": _described(query),
        "key and value": _described(key),
        "causal": causal,
        "order": order,
        "documents": documents,
        "scale": scale,
        "gradients": torch.is_grad_enabled() and _any_requires_grad(query, key, value),
    }
    return _compared(cut, things, group)


def require_same_tokens(
    tokens: torch.Tensor | tuple[torch.Tensor, ...], group: dist.ProcessGroup | None
) -> None:
    """Raise ValueError on every rank if ranks have different tokens, or one has a padding mask.

    Args:
        tokens: this rank's tokens, of the whole sequence; a tuple if a padding mask is beside them.
        group: the ranks that share the sequence.
    """
    is_masked = isinstance(tokens, tuple)
    own = tokens[0] if is_masked else tokens
    if not is_a_shape(own):
        agree(group, padding_mask=is_masked, tokens=own)
    if is_masked:
        raise ValueError(
            "padding masks are not supported: pad at the end, with targets that the loss ignores"
        )


def is_a_shape(x: torch.Tensor) -> bool:
    """Return whether a tensor has no values (`pipeline.shape_inference`, torch's meta device).

    Attention then returns a tensor with the shape of the query, and sends nothing.
    """
    return isinstance(x, torch.Tensor) and (isinstance(x, FakeTensor) or x.is_meta)


def _any_requires_grad(*tensors):
    """Return whether a backward will follow, in which all ranks exchange messages."""
    return any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def _described(tensor):
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device.type}"


def _compared(function, things, group):
    """Return `function()`; raise on every rank if it raises on one, or if `things` differ.

    The ranks compare an 8-byte digest first. Only if digests differ do they exchange the details.
    """
    result, digest = None, -1
    try:
        result = function()
        text = repr(things).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
    except (TypeError, ValueError):
        pass  # raised again below, on all ranks
    own = torch.tensor([digest], device=device_of(group))
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, own, group)
    if digest == -1 or set(torch.cat(digests).tolist()) != {digest}:
        raise_on_all(function, group, errors=(TypeError, ValueError), kind=ValueError)
        agree(group, **things)
    return result


def _require_shapes(query, key, value):
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            given = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor)
            raise ValueError(
                f"{name} must be a tensor of shape (batch, heads, sequence, head size), not {given}"
            )
    if not query.is_floating_point():
        raise TypeError(f"attention is for floating point, not {query.dtype}")
    if not query.numel() or not key.numel():
        raise ValueError(
            f"query and key must have elements, not shapes {tuple(query.shape)} and "
            f"{tuple(key.shape)}"
        )
    batch, heads, length, size = query.shape
    expect("key", key, (batch, key.shape[1], length, size), query)
    expect("value", value, key.shape, query)
    if heads % key.shape[1]:
        raise ValueError(f"{key.shape[1]} key-value heads do not divide {heads} heads")


def _require_positions(positions, own, order):
    if positions is None:
        return
    expected = [position for run in own for position in range(run.start, run.start + run.length)]
    if not isinstance(positions, torch.Tensor):
        raise ValueError(f"positions must be a tensor, not {type(positions)}")
    if positions.tolist() != expected:
        raise ValueError(
            f"the positions are not those of {order!r} order on this rank, which are "
            + ", ".join(f"{run.start} to {run.start + run.length - 1}" for run in own)
        )
