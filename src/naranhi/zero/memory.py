"""What a rank holds of a model sharded by ZeRO, counted as the memory that there is."""

from collections import Counter

import torch

from naranhi.zero.absent_gradient import Elsewhere


def held(zero, optimizer=None):
    """{kind: bytes} of the model state on this rank now, each piece of memory counted once.

    "parameters": as they are computed with, whole or a shard. "master": the shard's copy in fp32,
    in mixed precision. "gradients": in the dtype in which they are summed. "casts": gradients in
    the master's dtype, which there are while the optimizer works. "optimizer": its state.
    "padding": what of the memory of all these has nothing in it. Buffers and activations are not
    counted.
    """
    count, seen = (
        Counter(
            dict.fromkeys(("parameters", "master", "gradients", "casts", "optimizer", "padding"), 0)
        ),
        set(),
    )

    def add(kind, tensor, numbers):
        """A tensor of which so many numbers are not padding."""
        memory = tensor.untyped_storage()
        if memory.nbytes() and memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            count[kind] += numbers * tensor.element_size()
            count["padding"] += memory.nbytes() - numbers * tensor.element_size()

    for unit in zero.units:
        for flat in unit.flats:
            whole = flat.numbers(0, flat.length)
            mine = flat.numbers(flat.mine.start, flat.mine.stop)
            add("parameters", flat.whole, whole)
            add("parameters", flat.shard, mine)
            add("master", flat.master, mine)
            if flat.trained:
                add("gradients", flat.gradients, whole)
            if flat.gradient is not None:
                add("gradients", flat.gradient, mine)
            for one in flat.parameters:
                if one.grad is not None and not isinstance(one.grad, Elsewhere):
                    add("gradients", one.grad, one.grad.numel())
            for number, piece in flat.pieces.items():
                start = flat.mine.start + flat.spans[number].start
                numbers = flat.numbers(start, start + len(piece))
                if piece.grad is not None:
                    add("casts", piece.grad, numbers)
                for one in optimizer.state.get(piece, {}).values() if optimizer else ():
                    if torch.is_tensor(one):
                        add("optimizer", one, numbers if one.dim() else 1)
    return dict(count)
