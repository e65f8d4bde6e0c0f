"""The collectives, each written from send and receive.

Every function takes its tensors first and the process group last (`None` is the default group) and
works on any number of ranks, any shape and any dtype that can be added. A *root* is a rank within
the group. What a function writes into must be contiguous; what it only reads need not be. Arguments
that cannot be right are refused with a ValueError (TypeError for a dtype without a sum) on the rank
that passed them, before that rank sends anything. Sums are taken in another order than torch's, so
their last bits may differ from torch's; they are the same bits on every rank.

How communication overlaps. A kernel is a generator that carries one *piece* of a tensor through
the collective and yields whenever its messages are under way. `_overlap` keeps a few pieces under
way at once: one piece's bytes travel while another piece is being added. Every rank cuts and visits
the pieces in the same order, and starts the sends and receives of one step together. So nothing can
block for good: not on gloo, where a send waits for its receiver, and not on one NCCL communicator,
where messages run in the order in which they were started.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (2005), for the binomial trees and for halving and doubling; Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations" (2009), for the ring.
"""

from collections import deque
from itertools import islice

import torch
import torch.distributed as dist

from naranhi._arguments import _expect, _expect_none, _has_sum, _place, _read, _written

# Long tensors travel in pieces, whose messages are about this long. Starting a message from Python
# and waking two threads for it costs as much as sending a few hundred KiB; much longer messages do
# not stay in the cache between being received, added and sent on.
MESSAGE = 4 * 2**20  # bytes
UNDER_WAY = 3  # pieces that travel at the same time


# --- the collectives -----------------------------------------------------------------------------


def broadcast(tensor, root=0, group=None):
    """Copy the root's `tensor` into everyone's, in place, down a binomial tree."""
    group, rank, ranks = _place(group, root)
    flat = _written("tensor", tensor)
    _overlap(_tree_broadcast(flat[piece], root, group, rank, ranks) for piece in _pieces(flat))


def _tree_broadcast(data, root, group, rank, ranks):
    place = (rank - root) % ranks  # in the tree, whose root has place 0
    sent = []
    for distance in reversed(_distances(ranks)):
        if place % (2 * distance) == distance:  # my parent has it by now, and I have nothing yet
            arriving = _start(group, receives=[(data, (rank - distance) % ranks)])
            yield
            _finish(arriving)
        elif place % (2 * distance) == 0 and place + distance < ranks:
            sent += _start(group, sends=[(data, (rank + distance) % ranks)])
    yield
    _finish(sent)


def reduce(tensor, root=0, group=None):
    """Sum everyone's `tensor` into the root's, up a binomial tree; the others' stay as they are."""
    group, rank, ranks = _place(group, root)
    flat = _written("tensor", tensor) if rank == root else _read(tensor)
    _has_sum(tensor)
    _overlap(_tree_reduce(flat[piece], root, group, rank, ranks) for piece in _pieces(flat))


def _tree_reduce(total, root, group, rank, ranks):
    place = (rank - root) % ranks
    for distance in _distances(ranks):
        if place % (2 * distance) == distance:  # my subtree is complete: pass its sum up, and leave
            sent = _start(group, sends=[(total, (rank - distance) % ranks)])
            yield
            _finish(sent)
            return
        if place + distance < ranks:
            child = torch.empty_like(total)
            arriving = _start(group, receives=[(child, (rank + distance) % ranks)])
            yield
            _finish(arriving)
            total = torch.add(total, child, out=total if rank == root else child)


def scatter(output, inputs, root=0, group=None):
    """Give rank i the root's `inputs[i]`, in `output`.

    `inputs` has shape (ranks, *output.shape) on the root and is None elsewhere.
    """
    group, rank, ranks = _place(group, root)
    received = _written("output", output)
    if rank != root:
        _expect_none("inputs", inputs)
        _finish(_start(group, receives=[(received, root)]))
        return
    _expect("inputs", inputs, (ranks, *output.shape), like=output)
    rows = _read(inputs).tensor_split(ranks)
    works = _start(group, sends=[(rows[peer], peer) for peer in range(ranks) if peer != root])
    received.copy_(rows[root])  # while the others' travel
    _finish(works)


def gather(output, input, root=0, group=None):
    """Put rank i's `input` into the root's `output[i]`.

    `output` has shape (ranks, *input.shape) on the root and is None elsewhere.
    """
    group, rank, ranks = _place(group, root)
    sent = _read(input)
    if rank != root:
        _expect_none("output", output)
        _finish(_start(group, sends=[(sent, root)]))
        return
    _expect("output", output, (ranks, *input.shape), like=input)
    rows = _written("output", output).tensor_split(ranks)
    works = _start(group, receives=[(rows[peer], peer) for peer in range(ranks) if peer != root])
    rows[root].copy_(sent)
    _finish(works)


def all_to_all(output, input, group=None):
    """Send `input[i]` to rank i and receive `output[i]` from it; both have shape (ranks, *block).

    The two must not share memory.
    """
    group, rank, ranks = _place(group)
    _expect("output", output, (ranks, *input.shape[1:]), like=input)
    _expect("input", input, output.shape, like=output)
    received = _written("output", output).tensor_split(ranks)
    sent = _read(input).tensor_split(ranks)
    # Everyone begins with another peer, so that no rank is sent to by all at once.
    works = _start(
        group,
        sends=[(sent[(rank + i) % ranks], (rank + i) % ranks) for i in range(1, ranks)],
        receives=[(received[(rank - i) % ranks], (rank - i) % ranks) for i in range(1, ranks)],
    )
    received[rank].copy_(sent[rank])
    _finish(works)


def all_gather(output, input, group=None):
    """Put every rank's `input` into everyone's `output`, of shape (ranks, *input.shape): a ring."""
    group, rank, ranks = _place(group)
    _expect("output", output, (ranks, *input.shape), like=input)
    rows = _written("output", output).tensor_split(ranks)
    rows[rank].copy_(_read(input))
    _overlap(
        _ring_all_gather([row[piece] for row in rows], group, rank, ranks)
        for piece in _pieces(rows[rank])
    )


def _ring_all_gather(blocks, group, rank, ranks):
    """Begin with block `rank` in place; pass on to the right what last came from the left."""
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    for step in range(ranks - 1):
        leaving, arriving = blocks[(rank - step) % ranks], blocks[(rank - step - 1) % ranks]
        works = _start(group, sends=[(leaving, right)], receives=[(arriving, left)])
        yield
        _finish(works)


def reduce_scatter(output, input, group=None):
    """Sum everyone's `input`, of shape (ranks, *output.shape); rank i keeps row i in `output`.

    A ring. `output` may be `input[rank]`; otherwise the two must not share memory.
    """
    group, rank, ranks = _place(group)
    _expect("input", input, (ranks, *output.shape), like=output)
    _has_sum(output)
    flat, rows = _written("output", output), _read(input).tensor_split(ranks)
    if ranks == 1:
        flat.copy_(rows[0])
    _overlap(
        _ring_reduce_scatter([row[piece] for row in rows], flat[piece], group, rank, ranks)
        for piece in _pieces(flat)
    )


def _ring_reduce_scatter(blocks, output, group, rank, ranks):
    """Block i starts at rank i + 1, collects a sum at each rank, and ends complete at rank i.

    It ends in `output`, and `blocks` stay as they are; if `output` is None, sums replace blocks.
    """
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    leaving = blocks[left]
    for step in range(2, ranks + 1):
        own = blocks[(rank - step) % ranks]
        arriving = torch.empty_like(own)
        works = _start(group, sends=[(leaving, right)], receives=[(arriving, left)])
        yield
        _finish(works)
        total = own if output is None else output if step == ranks else arriving
        leaving = torch.add(arriving, own, out=total)


def all_reduce(tensor, group=None, algorithm="ring"):
    """Sum everyone's `tensor`, in place. `algorithm` is "ring" or "halving_doubling"."""
    if algorithm not in _ALL_REDUCE:
        raise ValueError(f"algorithm must be one of {sorted(_ALL_REDUCE)}, not {algorithm!r}")
    group, rank, ranks = _place(group)
    flat = _written("tensor", tensor)
    _has_sum(tensor)
    kernel = _ALL_REDUCE[algorithm]
    blocks = ranks if algorithm == "ring" else 2  # into which a step cuts a piece to send one
    _overlap(kernel(flat[piece], group, rank, ranks) for piece in _pieces(flat, blocks))


def _ring_all_reduce(data, group, rank, ranks):
    """All-reduce is reduce-scatter, then all-gather."""
    blocks = data.tensor_split(ranks)
    yield from _ring_reduce_scatter(blocks, None, group, rank, ranks)
    yield from _ring_all_gather(blocks, group, rank, ranks)


def _halving_doubling(data, group, rank, ranks):
    """The same two halves in log2(ranks) steps each, between ranks at distances 1, 2, 4, ...

    Only a power of two can halve: each rank beyond the largest one first adds its data to a
    partner's, and is given the result at the end.
    """
    core = 2 ** (ranks.bit_length() - 1)
    if rank >= core:
        works = _start(group, sends=[(data, rank - core)])
        yield
        _finish(works)
        works = _start(group, receives=[(data, rank - core)])
        yield
        _finish(works)
        return
    if rank + core < ranks:
        extra = torch.empty_like(data)
        works = _start(group, receives=[(extra, rank + core)])
        yield
        _finish(works)
        data.add_(extra)

    kept, steps = data, []
    for distance in reversed(_distances(core)):
        low, high = kept.tensor_split(2)
        kept, given = (high, low) if rank & distance else (low, high)
        arriving = torch.empty_like(kept)
        partner = rank ^ distance
        works = _start(group, sends=[(given, partner)], receives=[(arriving, partner)])
        yield
        _finish(works)
        kept.add_(arriving)
        steps.append((kept, given, partner))
    for kept, given, partner in reversed(steps):
        works = _start(group, sends=[(kept, partner)], receives=[(given, partner)])
        yield
        _finish(works)

    if rank + core < ranks:
        works = _start(group, sends=[(data, rank + core)])
        yield
        _finish(works)


_ALL_REDUCE = {"ring": _ring_all_reduce, "halving_doubling": _halving_doubling}


# --- messages ------------------------------------------------------------------------------------


def _start(group, sends=(), receives=()):
    """Start messages together, each a (tensor, rank in the group); `_finish` waits for them.

    Nothing is copied: until then what is sent must not change and what is received is not there.
    Empty messages are left out, at both ends.
    """
    messages = [(dist.irecv, *message) for message in receives]
    messages += [(dist.isend, *message) for message in sends]
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, tensor, peer in messages
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _finish(works):
    for work in works:
        work.wait()


def _overlap(kernels):
    """Run these generators to their ends, in turn, `UNDER_WAY` of them at a time."""
    kernels = iter(kernels)
    under_way = deque(islice(kernels, UNDER_WAY))
    while under_way:
        kernel = under_way.popleft()
        # One that has ended makes room for the next, which starts at once.
        while kernel and next(kernel, "ended") == "ended":
            kernel = next(kernels, None)
        if kernel:
            under_way.append(kernel)


def _pieces(flat, blocks=1):
    """Cut `flat` into slices of equal length, a `blocks`-th of which is at most `MESSAGE` long."""
    count = max(1, -(-flat.nbytes // (MESSAGE * blocks)))
    return [slice(len(flat) * i // count, len(flat) * (i + 1) // count) for i in range(count)]


def _distances(ranks):
    """1, 2, 4, ..., below `ranks`."""
    return [2**i for i in range((ranks - 1).bit_length())]
