"""The collectives, each written from send and receive.

Every function takes its tensors first and the process group last (`None` is the default group) and
works on any number of ranks, any shape and any dtype that can be added. A *root* is a rank within
the group. What a function writes into must be contiguous; what it only reads need not be. Arguments
that cannot be right are refused with a ValueError (TypeError for a dtype without a sum) on the rank
that passed them, before that rank sends anything. Sums are taken in another order than torch's, so
their last bits may differ from torch's; they are the same bits on every rank.

The algorithms are in `tree`, `ring` and `halving_doubling`; how their messages overlap is in
`chunks`. Where there are several, a tensor that fits into one message takes the one for which the
alpha-beta model of `naranhi.costs` gives the fewest seconds, and a longer one goes round the ring,
cut into chunks.
"""

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

# Starting a message takes as long as sending this many bytes: alpha over beta, as chapter 03
# measures it for gloo on one machine. (10 µs at 50 GB/s, a network's figures, give the same.)
START = 2**19

_ALL_REDUCE = {
    "ring": ring.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "doubling": halving_doubling.all_reduce_whole,
}
_ALGORITHMS = {
    "all_gather": ("ring", "doubling"),
    "reduce_scatter": ("ring", "halving"),
    "all_reduce": tuple(_ALL_REDUCE),
}


def broadcast(tensor, root=0, group=None):
    """Copy the root's `tensor` into everyone's, in place, down a binomial tree."""
    group, rank, ranks = locate(group, root)
    flat = writable("tensor", tensor)
    chunks.overlap(
        tree.broadcast(flat[chunk], root, group, rank, ranks) for chunk in chunks.cut(flat)
    )


def reduce(tensor, root=0, group=None):
    """Sum everyone's `tensor` into the root's, up a binomial tree; the others' stay as they are."""
    group, rank, ranks = locate(group, root)
    flat = writable("tensor", tensor) if rank == root else readable(tensor)
    require_sum(tensor)
    chunks.overlap(tree.reduce(flat[chunk], root, group, rank, ranks) for chunk in chunks.cut(flat))


def scatter(output, inputs, root=0, group=None):
    """Give rank i the root's `inputs[i]`, in `output`.

    `inputs` has shape (ranks, *output.shape) on the root and is None elsewhere.
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
    received.copy_(rows[root])  # while the others' travel
    chunks.finish(works)


def gather(output, input, root=0, group=None):
    """Put rank i's `input` into the root's `output[i]`.

    `output` has shape (ranks, *input.shape) on the root and is None elsewhere.
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


def all_to_all(output, input, group=None):
    """Send `input[i]` to rank i and receive `output[i]` from it; both have shape (ranks, *block).

    The two must not share memory.
    """
    group, rank, ranks = locate(group)
    expect("output", output, (ranks, *input.shape[1:]), like=input)
    expect("input", input, output.shape, like=output)
    received = writable("output", output).tensor_split(ranks)
    sent = readable(input).tensor_split(ranks)
    # Everyone begins with another peer, so that no rank is sent to by all at once.
    works = chunks.start(
        group,
        sends=[(sent[(rank + i) % ranks], (rank + i) % ranks) for i in range(1, ranks)],
        receives=[(received[(rank - i) % ranks], (rank - i) % ranks) for i in range(1, ranks)],
    )
    received[rank].copy_(sent[rank])
    chunks.finish(works)


def all_gather(output, input, group=None, algorithm=None):
    """Put every rank's `input` into everyone's `output`, of shape (ranks, *input.shape).

    torch's `all_gather_into_tensor`. algorithm: "ring" or, for a power of two, "doubling"; by
    default the quicker for this size, see the package.
    """
    group, rank, ranks = locate(group)
    expect("output", output, (ranks, *input.shape), like=input)
    algorithm = _choose("all_gather", output, ranks, algorithm)
    flat = writable("output", output)
    rows = flat.tensor_split(ranks)
    rows[rank].copy_(readable(input))
    if algorithm == "doubling":
        chunks.overlap([halving_doubling.all_gather(flat, group, rank, ranks)])
        return
    chunks.overlap(
        ring.all_gather([row[chunk] for row in rows], group, rank, ranks)
        for chunk in chunks.cut(rows[rank])
    )


def reduce_scatter(output, input, group=None, algorithm=None):
    """Sum everyone's `input`, of shape (ranks, *output.shape); rank i keeps row i in `output`.

    torch's `reduce_scatter_tensor`. `output` may be `input[rank]`; otherwise the two must not share
    memory. algorithm: "ring" or, for a power of two, "halving"; by default the quicker for this
    size, see the package.
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


def all_reduce(tensor, group=None, algorithm=None):
    """Sum everyone's `tensor`, in place.

    algorithm: "ring", "halving_doubling" or "doubling"; by default the quickest for this size, see
    the package.
    """
    group, rank, ranks = locate(group)
    algorithm = _choose("all_reduce", tensor, ranks, algorithm)
    flat = writable("tensor", tensor)
    require_sum(tensor)
    blocks = ranks if algorithm == "ring" else 2  # into which a step cuts a chunk to send one
    chunks.overlap(
        _ALL_REDUCE[algorithm](flat[chunk], group, rank, ranks)
        for chunk in chunks.cut(flat, blocks)
    )


def _choose(collective, whole, ranks, algorithm):
    """Return the algorithm: the one that was asked for, or the quickest for this many bytes."""
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
