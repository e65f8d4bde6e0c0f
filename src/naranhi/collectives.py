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

MESSAGE = 2 * 2**20  # bytes; longer tensors travel in pieces whose messages are no longer than this
UNDER_WAY = 4  # pieces that travel at the same time


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
    _overlap(
        _ring_reduce_scatter([row[piece] for row in rows], flat[piece], group, rank, ranks)
        for piece in _pieces(flat)
    )


def _ring_reduce_scatter(blocks, output, group, rank, ranks):
    """Block i starts at rank i + 1, collects a sum at each rank, and ends complete at rank i."""
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    if ranks == 1:
        output.copy_(blocks[0])
    leaving = blocks[left]
    for step in range(2, ranks + 1):
        own = blocks[(rank - step) % ranks]
        arriving = torch.empty_like(own)
        works = _start(group, sends=[(leaving, right)], receives=[(arriving, left)])
        yield
        _finish(works)
        leaving = torch.add(arriving, own, out=output if step == ranks else arriving)


def all_reduce(tensor, group=None, algorithm="ring"):
    """Sum everyone's `tensor`, in place. `algorithm` is "ring" or "halving_doubling"."""
    if algorithm not in _ALL_REDUCE:
        raise ValueError(f"algorithm must be one of {sorted(_ALL_REDUCE)}, not {algorithm!r}")
    group, rank, ranks = _place(group)
    flat = _written("tensor", tensor)
    _has_sum(tensor)
    kernel = _ALL_REDUCE[algorithm]
    _overlap(kernel(flat[piece], group, rank, ranks) for piece in _pieces(flat, ranks))


def _ring_all_reduce(data, group, rank, ranks):
    """All-reduce is reduce-scatter, then all-gather."""
    blocks = data.tensor_split(ranks)
    yield from _ring_reduce_scatter(blocks, blocks[rank], group, rank, ranks)
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
    """Cut `flat` into equal slices, a `blocks`-th of which is no longer than `MESSAGE`."""
    count = max(1, -(-flat.nbytes // (MESSAGE * blocks)))
    return [slice(len(flat) * i // count, len(flat) * (i + 1) // count) for i in range(count)]


def _distances(ranks):
    """1, 2, 4, ..., below `ranks`."""
    return [2**i for i in range((ranks - 1).bit_length())]


# --- arguments -----------------------------------------------------------------------------------


def _place(group, root=0):
    """The group, this rank in it, and its number of ranks."""
    group = dist.group.WORLD if group is None else group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this rank is not a member of the group")
    if not isinstance(root, int) or not 0 <= root < ranks:
        raise ValueError(f"root must be a rank of the group, 0 to {ranks - 1}, not {root!r}")
    return group, rank, ranks


def _written(name, tensor):
    """The tensor's own memory in one dimension, outside autograd, for messages to write into."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} must be contiguous, since it is written in place")
    return tensor.detach().view(-1)


def _read(tensor):
    """The tensor's values in one dimension, outside autograd; copied only if not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _expect(name, tensor, shape, like):
    """ValueError unless this is a tensor of that shape, with the dtype and device of `like`."""
    wanted = (tuple(shape), like.dtype, like.device)
    if not isinstance(tensor, torch.Tensor):
        kind = "None" if tensor is None else f"a {type(tensor).__name__}"
        raise ValueError(f"{name} must be a tensor of shape {wanted[0]} here, not {kind}")
    found = (tuple(tensor.shape), tensor.dtype, tensor.device)
    for what, one, other in zip(("shape", "dtype", "device"), found, wanted, strict=True):
        if one != other:
            raise ValueError(f"{name} must have {what} {other}, not {one}")


def _expect_none(name, tensor):
    if tensor is not None:
        raise ValueError(f"{name} is the root's alone: pass None on the other ranks")


def _has_sum(tensor):
    """TypeError for a dtype that torch cannot add on this device."""
    one = tensor.new_empty(1)
    try:
        torch.add(one, one)
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(f"{tensor.dtype} has no sum on {tensor.device}") from error
