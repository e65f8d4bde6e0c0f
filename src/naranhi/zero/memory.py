"""Model state that a rank holds under ZeRO, measured as the memory that is allocated."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from naranhi.zero.absent_gradient import Elsewhere

if TYPE_CHECKING:
    from naranhi.zero.zero import Zero


def held(zero: Zero, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Return {kind: bytes} of the model state on this rank now, counting each storage once.

    "parameters": as the computation uses them, whole or a shard. "master": the shard's copy in
    fp32, in mixed precision. "gradients": in the dtype in which they are reduced; at
    stages 2 and 3, sums of several micro-batches in the master's dtype. "casts": gradients in the
    master's dtype, allocated only during the optimizer's step. "optimizer": its state. "padding":
    what is allocated for any of these, and unused. Buffers and activations are not counted.

    Args:
        zero: The sharded model.
        optimizer: The optimizer of its shards; None leaves its state out.
    """
    count, seen = (
        Counter(
            dict.fromkeys(("parameters", "master", "gradients", "casts", "optimizer", "padding"), 0)
        ),
        set(),
    )

    def add(kind, tensor, numbers):
        """Count a tensor of which `numbers` elements are not padding."""
        memory = tensor.untyped_storage()
        if memory.nbytes() and memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            count[kind] += numbers * tensor.element_size()
            count["padding"] += memory.nbytes() - numbers * tensor.element_size()

    for unit in zero.units:
        for flat in unit.flats:
            whole = _numbers(flat, 0, flat.length)
            own = _numbers(flat, flat.shard_slice.start, flat.shard_slice.stop)
            add("parameters", flat.whole, whole)
            add("parameters", flat.shard, own)
            add("master", flat.master, own)
            if flat.trained:
                add("gradients", flat.gradients, whole)
            if flat.gradient is not None:
                add("gradients", flat.gradient, own)
            for param in flat.parameters:
                if param.grad is not None and not isinstance(param.grad, Elsewhere):
                    add("gradients", param.grad, param.grad.numel())
            for number, piece in flat.pieces.items():
                start = flat.shard_slice.start + flat.spans[number].start
                numbers = _numbers(flat, start, start + len(piece))
                if piece.grad is not None and not isinstance(piece.grad, Elsewhere):
                    add("casts", piece.grad, numbers)
                for value in optimizer.state.get(piece, {}).values() if optimizer else ():
                    if torch.is_tensor(value):
                        add("optimizer", value, numbers if value.dim() else 1)
    return dict(count)


def _numbers(flat, start, stop):
    """Return how many elements of a flat parameter from `start` to `stop` are not padding."""
    return sum(max(0, min(place.stop, stop) - max(place.start, start)) for place in flat.places)
