"""The collectives, each written with send and receive.

Every function takes its tensors before the process group (`None` is the default group), and works
on any number of ranks, any shape and any dtype that can be added (NCCL does not send int16). A
*root* is a rank within the group. A tensor that a function writes must be contiguous; a tensor that
it only reads need not be. Wrong arguments raise a ValueError (TypeError for a dtype without a sum)
on the rank that passed them, before that rank sends anything. Sums are taken in a different order
from torch's, so their last bits may differ from torch's; they are the same bits on every rank.

The algorithms are in `tree`, `ring` and `halving_doubling`; `chunks` overlaps their messages. If a
collective has several algorithms, a tensor that fits into one message uses the one that is fastest
in the alpha-beta model of `naranhi.costs`. A longer tensor is cut into chunks that go round the
ring.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from naranhi import costs
from naranhi.collectives import chunks, halving_doubling, ring, tree
from naranhi.collectives.arguments import (
    expect,
    expect_none,
    locate,
    readable,
    require_sum,
    writable,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

# Starting a message takes as long as sending this many bytes: alpha / beta, as chapter 03 measures
# it for gloo on one machine. (A network with 10 µs and 50 GB/s gives the same.)
START = 2**19

_ALL_REDUCE = {
    "ring": ring.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "doubling": halving_doubling.all_reduce_whole,
}
_ALGORITHMS = {
    "all_gather": ("doubling", "ring"),  # on two ranks they are the same, and the first is chosen
    "reduce_scatter": ("halving", "ring"),
    "all_reduce": tuple(_ALL_REDUCE),
}


def broadcast(tensor: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copy the root's `tensor` into every rank's `tensor`, in place, down a binomial tree."""
    group, rank, ranks = locate(group, root)
    flat = writable("tensor", tensor)
    chunks.overlap(
        tree.broadcast(flat[chunk], root, group, rank, ranks) for chunk in chunks.cut(flat)
    )


def reduce(tensor: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Sum every rank's `tensor` into the root's, up a binomial tree; the others do not change."""
    group, rank, ranks = locate(group, root)
    flat = writable("tensor", tensor) if rank == root else readable(tensor)
    require_sum(tensor)
    chunks.overlap(tree.reduce(flat[chunk], root, group, rank, ranks) for chunk in chunks.cut(flat))


def scatter(
    output: torch.Tensor,
    inputs: torch.Tensor | None,
    root: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send the root's `inputs[i]` to rank i, into `output`.

    `inputs` has shape (ranks, *output.shape) on the root and is None on the other ranks.
    """
    group, rank, ranks = locate(group, root)
    received = writable("output", output)
    if rank != root:
        expect_none("inputs", inputs)
        chunks.finish(chunks.start(group, receives=[(received, root)]))
        return
    expect("inputs", inputs, (ranks, *output.shape), like=output)
    rows = readable(inputs).tensor_split(ranks)
    works = chunks.start(group, sends=[(rows[peer], peer) for peer in range(ranks) if peer != root])
    received.copy_(rows[root])  # while the other rows are in flight
    chunks.finish(works)


def gather(
    output: torch.Tensor | None,
    input: torch.Tensor,
    root: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send rank i's `input` to the root, into `output[i]`.

    `output` has shape (ranks, *input.shape) on the root and is None on the other ranks.
    """
    group, rank, ranks = locate(group, root)
    sent = readable(input)
    if rank != root:
        expect_none("output", output)
        chunks.finish(chunks.start(group, sends=[(sent, root)]))
        return
    expect("output", output, (ranks, *input.shape), like=input)
    rows = writable("output", output).tensor_split(ranks)
    works = chunks.start(
        group, receives=[(rows[peer], peer) for peer in range(ranks) if peer != root]
    )
    rows[root].copy_(sent)
    chunks.finish(works)


def all_to_all(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Send `input[i]` to rank i and receive `output[i]` from rank i.

    Both tensors have shape (ranks, *block) and must not share memory.
    """
    group, rank, ranks = locate(group)
    expect("output", output, (ranks, *input.shape[1:]), like=input)
    expect("input", input, output.shape, like=output)
    received = writable("output", output).tensor_split(ranks)
    sent = readable(input).tensor_split(ranks)
    # Each rank starts with a different peer, so that no rank receives from all others at once.
    works = chunks.start(
        group,
        sends=[(sent[(rank + i) % ranks], (rank + i) % ranks) for i in range(1, ranks)],
        receives=[(received[(rank - i) % ranks], (rank - i) % ranks) for i in range(1, ranks)],
    )
    received[rank].copy_(sent[rank])
    chunks.finish(works)


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    algorithm: str | None = None,
) -> None:
    """Copy every rank's `input` into every rank's `output`, like torch's `all_gather_into_tensor`.

    Args:
        output: the result, of shape (ranks, *input.shape).
        input: this rank's row of the result.
        group: the ranks; None is the default group.
        algorithm: "ring" or, on a power of two ranks, "doubling"; by default the faster for this
            size (see the package).
    """
    group, rank, ranks = locate(group)
    expect("output", output, (ranks, *input.shape), like=input)
    algorithm = _choose("all_gather", output, ranks, algorithm)
    flat = writable("output", output)
    rows = flat.tensor_split(ranks)
    rows[rank].view(input.shape).copy_(input.detach())
    if algorithm == "doubling":
        chunks.overlap([halving_doubling.all_gather(flat, group, rank, ranks)])
        return
    chunks.overlap(
        ring.all_gather([row[chunk] for row in rows], group, rank, ranks)
        for chunk in chunks.cut(rows[rank])
    )


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    algorithm: str | None = None,
) -> None:
    """Sum every rank's `input` and keep row i on rank i, like torch's `reduce_scatter_tensor`.

    Args:
        output: row `rank` of the sum. It may be `input[rank]`; otherwise the two tensors must not
            share memory.
        input: the tensor to sum, of shape (ranks, *output.shape).
        group: the ranks; None is the default group.
        algorithm: "ring" or, on a power of two ranks, "halving"; by default the faster for this
            size (see the package).
    """
    group, rank, ranks = locate(group)
    expect("input", input, (ranks, *output.shape), like=output)
    require_sum(output)
    algorithm = _choose("reduce_scatter", input, ranks, algorithm)
    kept, flat = writable("output", output), readable(input)
    rows = flat.tensor_split(ranks)
    if ranks == 1:
        kept.copy_(rows[0])
    elif algorithm == "halving":
        chunks.overlap([halving_doubling.reduce_scatter(flat, kept, group, rank, ranks)])
    else:
        chunks.overlap(
            ring.reduce_scatter([row[chunk] for row in rows], kept[chunk], group, rank, ranks)
            for chunk in chunks.cut(kept)
        )


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, algorithm: str | None = None
) -> None:
    """Sum every rank's `tensor`, in place.

    `algorithm` is "ring", "halving_doubling" or "doubling"; by default the fastest for this size
    (see the package).
    """
    group, rank, ranks = locate(group)
    algorithm = _choose("all_reduce", tensor, ranks, algorithm)
    flat = writable("tensor", tensor)
    require_sum(tensor)
    blocks = ranks if algorithm == "ring" else 2  # of a chunk; each step sends one
    chunks.overlap(
        _ALL_REDUCE[algorithm](flat[chunk], group, rank, ranks)
        for chunk in chunks.cut(flat, blocks)
    )


def _choose(collective, whole, ranks, algorithm):
    """Return the requested algorithm, or the fastest for this many bytes."""
    if algorithm is None:
        if whole.nbytes > chunks.MESSAGE:
            return "ring"
        return costs.fastest(
            collective, whole.nbytes, ranks, START, 1, among=_ALGORITHMS[collective]
        )
    if algorithm not in _ALGORITHMS[collective]:
        raise ValueError(f"algorithm must be one of {_ALGORITHMS[collective]}, not {algorithm!r}")
    costs.collective_seconds(collective, whole.nbytes, ranks, START, 1, algorithm)  # or ValueError
    return algorithm
