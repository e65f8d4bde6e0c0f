"""Links as slow as you like: real messages, delayed for as long as such a link would take.

If several ranks share a few cores, the time of a collective shows how the cores were shared and not
what its messages cost. On a paced link a rank mostly waits, which uses no core, so four ranks on
two cores take as long as four machines would. Units: seconds, bytes.
"""

from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import isfinite
from threading import Lock
from time import monotonic, sleep

import torch.distributed as dist
from torch.distributed.distributed_c10d import irecv, isend

from naranhi.distributed.backends import backend_for

WAITING = 32  # messages that a rank can wait for at once, in a thread each


@contextmanager
def paced(alpha: float, beta: float, peers: Container[int] | None = None) -> Iterator[None]:
    """Pace this rank's link to a latency of `alpha` and an inverse bandwidth of `beta`.

    This delays the messages that `dist.isend`, `dist.irecv` and `dist.batch_isend_irecv` start, so
    also those of `naranhi.collectives`. The model is that of `naranhi.costs`: a message of m bytes
    takes alpha + m * beta seconds, and a rank sends one message and receives one message at a time.
    Enter the context on every rank. For two kinds of links, enter it twice, with different peers.

    Args:
        alpha: the latency in seconds. Real messages must be quick compared with it, so make it
            some milliseconds.
        beta: the inverse bandwidth in seconds per byte.
        peers: the global ranks at the other end of the link, such as those of another node; None
            for all. Messages from and to other ranks are not delayed.

    Raises:
        ValueError: alpha or beta is negative or not finite; a message is not sent by gloo; or a
            receive does not name its sender, on whom the delay depends.
    """
    if not all(isfinite(value) and value >= 0 for value in (alpha, beta)):
        raise ValueError(f"alpha and beta are times, 0 or more, not {alpha!r} and {beta!r}")
    unpaced, unpaced_message = dist.batch_isend_irecv, dist.P2POp
    unpaced_send, unpaced_receive = dist.isend, dist.irecv  # perhaps paced already, for other peers

    def start(messages):
        return [work for message in messages for work in start_message(message)]

    def start_message(message):
        if backend_for(message.tensor.device, message.group) != "gloo":
            raise ValueError("only gloo's messages can be paced")
        if peers is not None and message.peer not in peers:
            return unpaced([message])
        takes = alpha + message.tensor.nbytes * beta
        if message.op is irecv:
            return [_Work(inward.submit(link.receive, unpaced([message]), takes))]
        return [_Work(link.send(message, takes))]

    def send(tensor, dst=None, group=None, tag=0, group_dst=None):
        return start([unpaced_message(isend, tensor, dst, group, tag, group_dst)])[0]

    def receive(tensor, src=None, group=None, tag=0, group_src=None):
        if src is None and group_src is None:
            raise ValueError("a paced link receives from a named rank: pass src= or group_src=")
        return start([unpaced_message(irecv, tensor, src, group, tag, group_src)])[0]

    def message(op, *arguments, **options):
        """Make a message of a batch; replace this context's operations by torch's own."""
        return unpaced_message({send: isend, receive: irecv}.get(op, op), *arguments, **options)

    # One worker sends, so that messages stay in order.
    inward, outward = ThreadPoolExecutor(WAITING), ThreadPoolExecutor(1)
    link = Link(unpaced, outward)
    dist.batch_isend_irecv, dist.P2POp = start, message
    dist.isend, dist.irecv = send, receive
    failed = True
    try:
        yield
        failed = False
    finally:
        dist.batch_isend_irecv, dist.P2POp = unpaced, unpaced_message
        dist.isend, dist.irecv = unpaced_send, unpaced_receive
        for workers in (inward, outward):  # an error does not wait for messages that may not come
            workers.shutdown(wait=not failed, cancel_futures=failed)


class Link:
    """A rank's link, which sends one message and receives one message at a time.

    Args:
        start: starts messages, as `dist.batch_isend_irecv` does.
        outward: an executor of one thread, which runs calls in order.

    Attributes:
        sent, received: when its last message ends or ended, in seconds of `monotonic()`.
    """

    start: Callable[[list[dist.P2POp]], list[dist.Work]]
    outward: ThreadPoolExecutor
    sent: float
    received: float

    def __init__(
        self,
        start: Callable[[list[dist.P2POp]], list[dist.Work]],
        outward: ThreadPoolExecutor,
    ) -> None:
        self.start, self.outward = start, outward
        self.sent = self.received = 0.0
        self._lock = Lock()

    def send(self, message: dist.P2POp, takes: float) -> Future[list[dist.Work]]:
        """Queue a message that takes `takes` seconds, and start it when it would arrive."""
        with self._lock:  # in the order of calls, whichever threads make them
            arrival = self.sent = max(monotonic(), self.sent) + takes
            return self.outward.submit(self.deliver, message, arrival)

    def deliver(self, message: dist.P2POp, arrival: float) -> list[dist.Work]:
        """Start a message when it would arrive. Waiting for it here would delay the next."""
        sleep(max(0.0, arrival - monotonic()))
        return self.start([message])

    def receive(self, works: list[dist.Work], takes: float) -> list[dist.Work]:
        """Wait for a message, which its sender delayed, and longer if it queued behind another."""
        _wait_for(works)
        with self._lock:
            end = self.received = max(monotonic(), self.received + takes)
        sleep(max(0.0, end - monotonic()))
        return []


def _wait_for(works):
    for work in works:
        work.wait()


class _Work:
    """A message in flight, with the `wait` method of torch's `Work`."""

    def __init__(self, future):
        self.future = future

    def wait(self):
        _wait_for(self.future.result())
