"""Messages in flight, and chunks of a long tensor that take turns.

A collective is written as a generator that carries one *chunk* of a tensor through all its steps
and yields whenever its messages are in flight. `overlap` keeps a few chunks in flight at once: the
bytes of one chunk travel while another chunk is being reduced. Every rank cuts and visits the
chunks in the same order, and starts the sends and receives of one step together. So nothing can
block forever: not on gloo, where a send waits for its receiver, and not on one NCCL communicator,
where messages run in the order in which they were started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
import torch.distributed as dist

# Starting a message from Python and waking two threads for it costs as much as sending a few
# hundred KiB. Much longer messages do not stay in the cache while they are received, reduced and
# sent on.
MESSAGE = 4 * 2**20  # bytes of a message of a long tensor
IN_FLIGHT = 4  # chunks in flight at the same time


def start(
    group: dist.ProcessGroup,
    sends: Iterable[tuple[torch.Tensor, int]] = (),
    receives: Iterable[tuple[torch.Tensor, int]] = (),
) -> list[dist.Work]:
    """Start messages together, each a (tensor, rank in the group); `finish` waits for them.

    Nothing is copied: until then, do not write to a sent tensor or read a received one. Empty
    messages are skipped at both ends.

    Raises:
        ValueError: a tensor is not in a CPU's memory, from which alone gloo sends (it would end the
            process).
    """
    messages = [(dist.irecv, *message) for message in receives]
    messages += [(dist.isend, *message) for message in sends]
    for _, tensor, _ in messages:
        if tensor.device.type != "cpu" and dist.get_backend(group) == "gloo":
            raise ValueError(
                f"gloo sends from a CPU's memory, and a tensor is on {tensor.device}: use NCCL "
                "between GPUs, or move the tensor to the CPU"
            )
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, tensor, peer in messages
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def finish(works: Iterable[dist.Work]) -> None:
    """Wait for the messages that `start` returned."""
    for work in works:
        work.wait()


def overlap(chunks: Iterable[Iterator[None]]) -> None:
    """Run these generators to their ends, in turn, `IN_FLIGHT` of them at a time."""
    chunks = iter(chunks)
    in_flight = deque(islice(chunks, IN_FLIGHT))
    while in_flight:
        chunk = in_flight.popleft()
        # A generator that has ended makes room for the next one, which starts at once.
        while chunk and next(chunk, "ended") == "ended":
            chunk = next(chunks, None)
        if chunk:
            in_flight.append(chunk)


def cut(flat: torch.Tensor, blocks: int = 1) -> list[slice]:
    """Cut `flat` into slices of equal length, a `blocks`-th of which is at most `MESSAGE` bytes."""
    count = max(1, -(-flat.nbytes // (MESSAGE * blocks)))
    return [slice(len(flat) * i // count, len(flat) * (i + 1) // count) for i in range(count)]


def distances(ranks: int) -> list[int]:
    """Return the powers of two below `ranks`: 1, 2, 4, ..."""
    return [2**i for i in range((ranks - 1).bit_length())]
