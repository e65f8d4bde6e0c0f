"""Messages in flight, and chunks of a long tensor that take turns.

A collective is written as a generator that carries one *chunk* of a tensor through all its steps
and yields whenever its messages are in flight. `overlap` keeps a few chunks in flight at once: the
bytes of one chunk travel while another chunk is being added. Every rank cuts and visits the chunks
in the same order, and starts the sends and receives of one step together. So nothing can block
forever: not on gloo, where a send waits for its receiver, and not on one NCCL communicator, where
messages run in the order in which they were started.
"""

from collections import deque
from itertools import islice

import torch.distributed as dist

# Starting a message from Python and waking two threads for it costs as much as sending a few
# hundred KiB; much longer messages do not stay in the cache between being received, added and
# sent on.
MESSAGE = 4 * 2**20  # bytes of a message of a long tensor
IN_FLIGHT = 3  # chunks that travel at the same time


def start(group, sends=(), receives=()):
    """Start messages together, each a (tensor, rank in the group); `finish` waits for them.

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


def finish(works):
    """Wait for the messages that `start` returned."""
    for work in works:
        work.wait()


def overlap(chunks):
    """Run these generators to their ends, in turn, `IN_FLIGHT` of them at a time."""
    chunks = iter(chunks)
    in_flight = deque(islice(chunks, IN_FLIGHT))
    while in_flight:
        chunk = in_flight.popleft()
        # One that has ended makes room for the next, which starts at once.
        while chunk and next(chunk, "ended") == "ended":
            chunk = next(chunks, None)
        if chunk:
            in_flight.append(chunk)


def cut(flat, blocks=1):
    """Cut `flat` into slices of equal length, a `blocks`-th of which is at most `MESSAGE` long."""
    count = max(1, -(-flat.nbytes // (MESSAGE * blocks)))
    return [slice(len(flat) * i // count, len(flat) * (i + 1) // count) for i in range(count)]


def distances(ranks):
    """Return 1, 2, 4, ..., below `ranks`."""
    return [2**i for i in range((ranks - 1).bit_length())]
