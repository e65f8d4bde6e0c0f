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

from naranhi.distributed import backend_for

# Starting a message from Python and waking two threads for it costs as much as sending a few
# hundred KiB. Much longer messages do not stay in the cache while they are received, reduced and
# sent on.
MESSAGE = 4 * 2**20  # bytes of a message of a long tensor
IN_FLIGHT = 4  # chunks in flight at the same time


def start(
    group: dist.ProcessGroup,
    sends: Iterable[tuple[torch.Tensor, int]] = (),
    receives: Iterable[tuple[torch.Tensor, int]] = (),
    tag: int = 0,
) -> list[dist.Work]:
    """Start messages together, each a (tensor, rank in the group); `finish` waits for them.

    Nothing is copied: until `finish` returns, do not write to a sent tensor or read a received one.
    Empty messages are skipped at both ends. NCCL needs a batch, or messages would wait for each
    other; on gloo, torch takes longer to check a batch than to send a few kilobytes.

    Args:
        group: the group.
        sends: what to send, and to whom.
        receives: what to receive, and from whom.
        tag: distinguishes messages where the backend supports tags: gloo does, NCCL does not.

    Returns:
        The messages in flight: on gloo the sends, then the receives; on NCCL one work for all.

    Raises:
        ValueError: the group has no such rank (gloo would read out of bounds), a
            tensor is not contiguous, or no backend of the group sends from its device (gloo would
            end the process). Nothing has been started.
    """
    # Sends first: on gloo this makes a step of many small messages a tenth shorter.
    messages = [(dist.isend, tensor, peer) for tensor, peer in sends if tensor.numel()]
    messages += [(dist.irecv, tensor, peer) for tensor, peer in receives if tensor.numel()]
    backend = backend_for(messages[0][1].device, group) if messages else None
    refuse(messages, dist.get_world_size(group), backend)
    if backend == "gloo":
        return [operation(tensor, None, group, tag, peer) for operation, tensor, peer in messages]
    batch = [
        dist.P2POp(operation, tensor, None, group, tag, peer)
        for operation, tensor, peer in messages
    ]
    return dist.batch_isend_irecv(batch) if batch else []


def refuse(
    messages: Iterable[tuple[object, torch.Tensor, int]], ranks: int, backend: str | None
) -> None:
    """Raise a ValueError for the first message that cannot be sent, before any is started.

    An error raised later would leave other messages half sent. For a short message every function
    call counts, so this is one loop.
    """
    for _, tensor, peer in messages:
        if not 0 <= peer < ranks:
            raise ValueError(f"a message is to or from rank {peer}, not 0 to {ranks - 1}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"a message of shape {tuple(tensor.shape)} has strides {tensor.stride()}: send and "
                "receive contiguous tensors"
            )
        if backend is None or (backend == "gloo" and not tensor.is_cpu):
            raise ValueError(
                f"no backend of the group sends from {tensor.device}: use NCCL between GPUs, gloo "
                "between CPUs"
            )


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
