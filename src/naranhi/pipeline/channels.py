"""The messages between the stages of a pipeline: on a channel they match by order, nothing else.

Each channel (from a rank, to a rank, activations or gradients) has a process group of its own, so
that a receive that was posted ahead stands in nobody's way: on one NCCL communicator it would hold
up the sends issued after it. Sends are started and not waited for.

# Note [The first steps between GPUs]
A message by NCCL waits on the GPU: its kernel spins until the peer's kernel runs. The first launch
of another kernel may itself wait until the GPU has finished everything else, pending messages
included: CUDA loads kernels when they are first launched, and libraries such as cuBLAS set up
handles and memory at their first call (so CUDA_MODULE_LOADING=EAGER is no cure). If the pending
messages cannot finish before the new kernel has run, both ranks wait for ever. That is so for a
receive posted ahead, and for a send that the peer is not ready to receive. On two ranks of an H100
(torch 2.11, NCCL 2.28), PipeDream deadlocked so at the first product of a layer, and, with its
layers' kernels loaded before, at one of the next steps. Hence the first steps of a kind, in which
its kernels are loaded, send by way of the CPUs: gloo waits there, and the GPU is never kept
waiting.
Sources: NVIDIA, "CUDA programming guide", "Lazy loading", on concurrent execution; and
github.com/meta-pytorch/torchcomms/pull/2334, which reproduces the wait. It is the same with
whatever else waits for the whole GPU: in a step, wait for a stream, not by
`torch.cuda.synchronize()`.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

AGREEMENT = "agreement"  # purpose of the group of all ranks of a pipeline
AHEAD = 2  # receives posted ahead on a channel: one arrives while the one before it is worked on
BY_CPU = 2  # see [The first steps between GPUs]; an optimizer's second update has other kernels


def new_groups(mine, timeout):
    """This rank's process groups, when nothing is wrong on any rank of the world; all call this.

    mine: what this rank was given for its pipeline, by name. "pipeline": its ranks in the world, on
    which all but the next two must be the same. "replicas": the ranks in the world that have the
    same stages in other pipelines, or None; on these all but the first and the last must be the
    same. "place in the pipeline". "groups": those that the ranks of the pipeline need among them,
    as pairs (ranks in the world, purpose). "copies": see `tied_weights.copies`. Or "error". Empty
    for a rank in no pipeline. timeout: seconds, of each message.

    Returns {(ranks, purpose): group}. Torch makes a group on all ranks at once, members or not, and
    in one order: so every rank makes those of all pipelines. Raises the error of any rank, and
    ValueError where ranks of a pipeline, or replicas, were given different things, or copies that
    are not equal.
    """
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    for one in (mine, *told):
        if "error" in one:
            raise one["error"]
    for which, called, but in (
        ("pipeline", "of one pipeline", {"replicas", "place in the pipeline", "copies"}),
        ("replicas", "replicas of one another", {"pipeline", "groups", "copies"}),
    ):
        _compare(told, which, called, but)
        _compare_copies(told, which, called)
    groups, both = {}, "cpu:gloo,cuda:nccl" if dist.get_backend() == "nccl" else "gloo"
    for ranks, purpose in dict.fromkeys(pair for one in told for pair in one.get("groups", ())):
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout),
            group_desc="unchecked",
            # The ranks agree on their CPUs, which would otherwise wait for their GPUs.
            backend="gloo" if purpose == AGREEMENT else both,
        )
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
                    + f": {given.get(what)} and {one[what]}" * short
                )


def _compare_copies(gathered, which, called):
    """Raise ValueError if two ranks that belong together have different values of a tensor."""
    first = {}
    for rank, given in enumerate(gathered):
        for name, digest in given.get("copies", {}).get(which, {}).items():
            other, expected = first.setdefault((given[which], name), (rank, digest))
            if digest != expected:
                raise ValueError(
                    f"rank {other} and rank {rank}, {called}, have different values of {name}: "
                    "give both the same, by one seed or one checkpoint"
                )


def carrier(device, earlier):
    """Return the device whose memory the messages of a step go through, on their way to `device`.

    earlier: how many steps of the same kind there have been. See [The first steps between GPUs].
    """
    return device if earlier >= BY_CPU else torch.device("cpu")


class Sender:
    """The end of a channel that sends; a message is a list of tensors, which may be empty.

    peer: its rank in the world. A first message, of no meaning, is sent at once: where that makes
    the connection (NCCL), it would else be made while its two ranks also wait for others.
    """

    def __init__(self, group, peer, device):
        self.group, self.peer, self.carrier = group, peer, device
        self.pending = deque()
        # Gloo does not say whether a send is done, other than by waiting: a thread does that.
        self.thread = ThreadPoolExecutor(1)
        dist.send(torch.zeros(1, device=device), peer, group)

    def send(self, tensors):
        """Start sending. The tensors are held until they are sent, and must not be changed."""
        tensors = [
            tensor.resolve_conj().resolve_neg().contiguous().to(self.carrier) for tensor in tensors
        ]
        works = [dist.isend(tensor, self.peer, self.group) for tensor in tensors]
        if self.carrier.type == "cpu":
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
        """Let go of the group, and end the thread; it may be waiting for a peer that is gone, until
        the deadline."""
        self.group = None
        self.pending.clear()
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
        self.group, self.peer, self.device, self.carrier = group, peer, device, device
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
            tensors = [
                torch.empty(shape, dtype=dtype, device=self.carrier) for shape, dtype in message
            ]
            works = [dist.irecv(tensor, self.peer, self.group) for tensor in tensors]
            self.posted.append((works, tensors))

    def take(self):
        """The next message, when it has come: a list of tensors."""
        works, tensors = self.posted.popleft()
        _wait(works, tensors)
        self._post()
        return [tensor.to(self.device) for tensor in tensors]

    def flush(self):
        """Everything that was expected has been taken."""

    def close(self):
        """Let go of the group, and of messages that will not come."""
        self.group = None
        self.posted.clear()
