"""Links as slow as you like: real messages, held back for as long as such a link would take.

Where several ranks share a few cores, the time of a collective tells how the cores were shared and
not what its messages cost. On a paced link a rank mostly waits, which takes no core, so that four
ranks on two cores take as long as four machines would. Units: seconds, bytes.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import isfinite
from time import monotonic, sleep

import torch.distributed as dist


@contextmanager
def paced(alpha, beta):
    """Give this rank a link of latency `alpha` (seconds) and inverse bandwidth `beta` (seconds per
    byte), for messages started by `dist.batch_isend_irecv`, as all of `naranhi.collectives` does.

    The model of `naranhi.costs`: a message of m bytes takes alpha + m * beta seconds, and a rank
    sends one message and receives one at a time. Enter it on every rank. Real messages must be
    quick against alpha, so make it some milliseconds.

    Raises ValueError for an alpha or beta that is negative or not finite, and for a message that
    does not travel by gloo.
    """
    if not all(isfinite(value) and value >= 0 for value in (alpha, beta)):
        raise ValueError(f"alpha and beta are times, 0 or more, not {alpha!r} and {beta!r}")
    unpaced = dist.batch_isend_irecv
    sent = received = 0.0  # when the link will be, or was, done with the last message

    def send(message, arrival):
        sleep(max(0.0, arrival - monotonic()))
        _wait_for(unpaced([message]))

    def receive(works, takes):
        nonlocal received
        _wait_for(works)
        # It has been held back on its way; again only if another one was coming in meanwhile.
        received = max(monotonic(), received + takes)
        sleep(max(0.0, received - monotonic()))

    def start(messages):
        nonlocal sent
        works = []
        for message in messages:
            if dist.get_backend(message.group) != "gloo":
                raise ValueError("only gloo's messages can be paced")
            takes = alpha + message.tensor.nbytes * beta
            if message.op is dist.irecv:
                works.append(_Work(inward.submit(receive, unpaced([message]), takes)))
            else:
                sent = max(monotonic(), sent) + takes
                works.append(_Work(outward.submit(send, message, sent)))
        return works

    # One worker each way, so that messages stay in order.
    with ThreadPoolExecutor(1) as inward, ThreadPoolExecutor(1) as outward:
        dist.batch_isend_irecv = start
        try:
            yield
        finally:
            dist.batch_isend_irecv = unpaced


def _wait_for(works):
    for work in works:
        work.wait()


class _Work:
    """A message under way, with the `wait` of torch's own."""

    def __init__(self, future):
        self.future = future

    def wait(self):
        self.future.result()
