"""The messages between the stages of a pipeline: on a channel they match by order, nothing else.

Each channel (from a rank, to a rank, activations or gradients) has a process group of its own, so
that a receive that was posted ahead stands in nobody's way: on one NCCL communicator it would hold
up the sends issued after it. Sends are started and not waited for.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

AHEAD = 2  # receives posted ahead on a channel: one arrives while the one before it is worked on


def meet(mine, timeout):
    """This rank's process groups, when nothing is wrong on any rank of the world; all call this.

    mine: what this rank was given for its pipeline, by name. "pipeline": its ranks in the world, on
    which all but the next two must be the same. "replicas": the ranks in the world that have the
    same stages in other pipelines, or None; on these all but the first and the last must be the
    same. "place in the pipeline". "groups": those that the ranks of the pipeline need among them,
    as pairs (ranks in the world, purpose). Or "error". Empty for a rank in no pipeline.
    timeout: seconds, of each message.

    Returns {(ranks, purpose): group}. Torch makes a group on all ranks at once, members or not, and
    in one order: so every rank makes those of all pipelines. Raises the error of any rank, and
    ValueError where ranks of a pipeline, or replicas, were given different things.
    """
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    for one in (mine, *told):
        if "error" in one:
            raise one["error"]
    _compare(told, "pipeline", "of one pipeline", {"replicas", "place in the pipeline"})
    _compare(told, "replicas", "replicas of one another", {"pipeline", "groups"})
    groups = {}
    for ranks, purpose in dict.fromkeys(pair for one in told for pair in one.get("groups", ())):
        group = dist.new_group(
            list(ranks), timeout=timedelta(seconds=timeout), group_desc="unchecked")
        if (ranks, purpose) in mine.get("groups", ()):
            groups[ranks, purpose] = group
    return groups


def _compare(told, which, called, but):
    """ValueError where two of the ranks that belong together were given different things.

    which: by what name in `told` the ranks stand that do; called: what they are to each other. but:
    the names of what may differ.
    """
    for rank, one in enumerate(told):
        other = (one.get(which) or [rank])[0]
        given = told[other]
        for what in one:
            if what not in but and one[what] != given.get(what):
                short = what not in ("schedule", "groups")
                raise ValueError(
                    f"rank {other} and rank {rank}, {called}, disagree on {what}"
                    + f": {given.get(what)} and {one[what]}" * short)


class Sender:
    """The end of a channel that sends; a message is a list of tensors, which may be empty.

    peer: its rank in the world. A first message, of no meaning, is sent at once: where that makes
    the connection (NCCL), it would else be made while its two ranks also wait for others.
    """

    def __init__(self, group, peer, device):
        self.group, self.peer = group, peer
        self.pending = deque()
        # Gloo does not say whether a send is done, other than by waiting: a thread does that.
        gloo = dist.get_backend(group) == "gloo"
        self.thread = ThreadPoolExecutor(1) if gloo else None
        dist.send(torch.zeros(1, device=device), peer, group)

    def send(self, tensors):
        """Start sending. The tensors are held until they are sent, and must not be changed."""
        tensors = [tensor.contiguous() for tensor in tensors]
        works = [dist.isend(one, self.peer, self.group) for one in tensors]
        if self.thread:
            self.pending.append(self.thread.submit(_wait, works, tensors))
        else:
            self.pending.append(_Polled(works, tensors))
        while self.pending and self.pending[0].done():
            self.pending.popleft().result()

    def flush(self):
        """Return when everything is sent; raises what went wrong."""
        while self.pending:
            self.pending.popleft().result()

    def close(self):
        """End the thread, which may be waiting for a peer that is gone: until the deadline."""
        if self.thread:
            self.thread.shutdown(wait=False)


def _wait(works, tensors):
    """Hold the tensors until they are sent."""
    for work in works:
        work.wait()


class _Polled:
    """A message under way where one can ask whether it is done: the same as a future."""

    def __init__(self, works, tensors):
        self.works, self.tensors = works, tensors

    def done(self):
        return all(work.is_completed() for work in self.works)

    def result(self):
        _wait(self.works, self.tensors)


class Receiver:
    """The end that receives, into buffers of which at most `AHEAD` wait for their message."""

    def __init__(self, group, peer, device):
        self.group, self.peer, self.device = group, peer, device
        dist.recv(torch.zeros(1, device=device), peer, group)
        self.coming, self.posted = iter(()), deque()

    def expect(self, messages):
        """What will come, in order: for each message its tensors, as (shape, dtype) pairs."""
        self.coming, self.posted = iter(messages), deque()
        for _ in range(AHEAD):
            self._post()

    def _post(self):
        message = next(self.coming, None)
        if message is not None:
            tensors = [torch.empty(shape, dtype=dtype, device=self.device)
                       for shape, dtype in message]
            works = [dist.irecv(one, self.peer, self.group) for one in tensors]
            self.posted.append((works, tensors))

    def take(self):
        """The next message, when it has come: a list of tensors."""
        works, tensors = self.posted.popleft()
        _wait(works, tensors)
        self._post()
        return tensors

    def flush(self):
        """Everything that was expected has been taken."""

    def close(self):
        """Nothing to end."""
