"""Send and receive the messages between the stages of a pipeline.

Messages on a channel match by order, and by nothing else. Each channel (from a rank, to a rank,
activations or gradients) has a process group of its own, so that a receive posted ahead delays no
other message: on a shared NCCL communicator it would hold up the sends issued after it. Sends are
started and not waited for.

# Note [Receives ahead]
On a CPU two receives of a channel are posted ahead, so that a message can arrive while the message
before it waits to be taken. On a GPU one receive is: it is posted when the message before it is
taken, so the next message still arrives while that one is processed. A second receive would be a
kernel that waits for the first. A GPU starts the kernels of all its streams from a few queues, in
launch order (from a single queue with CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM requires): no
kernel starts behind one that cannot start yet, not even a kernel that the sender is waiting for.
(Each tensor of a message is a separate kernel: with several tensors, use more than one queue.)
Source: NVIDIA, "CUDA programming guide", "CUDA environment variables".

# Note [The first steps between GPUs]
A message by NCCL waits on the GPU: its kernel spins until the peer's kernel runs. The first launch
of another kernel may itself wait until the GPU has finished everything else, pending messages
included: CUDA loads kernels when they are first launched, and libraries such as cuBLAS set up
handles and memory at their first call (so CUDA_MODULE_LOADING=EAGER does not help). If the pending
messages cannot finish before the new kernel has run, both ranks wait forever. This holds for a
receive posted ahead, and for a send that the peer is not ready to receive. On two ranks on one H100
(torch 2.11, NCCL 2.28), PipeDream deadlocked in this way at the first matrix product of a layer,
and, with the kernels of its layers loaded beforehand, in one of the next steps.
Therefore the first steps of a kind, in which its kernels are loaded, send through the CPUs: gloo
waits there, and the GPU never has to wait.
Sources: NVIDIA, "CUDA programming guide", "Lazy loading", on concurrent execution; and
github.com/meta-pytorch/torchcomms/pull/2334, which reproduces the wait. Anything else that waits
for the whole GPU has the same effect: within a step, wait for a stream, and do not call
`torch.cuda.synchronize()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

BY_CPU = 2  # see [The first steps between GPUs]; an optimizer's second update runs new kernels


def carrier(device: torch.device, earlier: int) -> torch.device:
    """Return the device through whose memory a step's messages travel on their way to `device`.

    See Note [The first steps between GPUs].

    Args:
        device: the device on which the stages compute.
        earlier: the number of earlier steps of the same kind.
    """
    return device if earlier >= BY_CPU else torch.device("cpu")


def ahead(device: torch.device) -> int:
    """Return how many receives of a channel are posted ahead: see Note [Receives ahead].

    Args:
        device: the device through whose memory the messages travel.
    """
    return 2 if device.type == "cpu" else 1


class Sender:
    """The sending end of a channel; a message is a list of tensors, which may be empty.

    The constructor sends a dummy message, at which NCCL connects the two ranks. Otherwise they
    would connect within a step, while they also wait for other ranks.

    Args:
        group: the process group of the channel.
        peer: the receiving rank, in the world.
        device: the device through whose memory messages travel, until `carrier` is set anew.
    """

    group: dist.ProcessGroup | None
    peer: int
    carrier: torch.device
    pending: deque[Future[None] | _Polled]

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self.group, self.peer, self.carrier = group, peer, device
        self.pending = deque()
        # With gloo, only waiting tells whether a send is done, so a thread waits.
        self.thread: ThreadPoolExecutor = ThreadPoolExecutor(1)
        dist.send(torch.zeros(1, device=device), peer, group)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start sending the tensors; they are held until they are sent, and must not be changed."""
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

    def flush(self) -> None:
        """Wait until everything is sent; raise what went wrong."""
        while self.pending:
            self.pending.popleft().result()

    def close(self) -> None:
        """Drop the group, and end the thread.

        The thread may wait for a peer that is gone, until the group's timeout.
        """
        self.group = None
        self.pending.clear()
        self.thread.shutdown(wait=False)


def _wait(works, tensors):
    """Hold the tensors until they are sent."""
    for work in works:
        work.wait()


class _Polled:
    """A message in flight that can be asked whether it is done, with the interface of a future."""

    works: list[dist.Work]
    tensors: list[torch.Tensor]

    def __init__(self, works: list[dist.Work], tensors: list[torch.Tensor]) -> None:
        self.works, self.tensors = works, tensors

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def result(self) -> None:
        _wait(self.works, self.tensors)


class Receiver:
    """The receiving end of a channel, with buffers for the messages posted `ahead`.

    The constructor receives the first message of the `Sender`.

    Args:
        group: the process group of the channel.
        peer: the sending rank, in the world.
        device: the device of the tensors that `take` returns, through whose memory messages travel
            until `carrier` is set anew.
    """

    group: dist.ProcessGroup | None
    peer: int
    device: torch.device
    carrier: torch.device
    coming: Iterator[Sequence[tuple[tuple[int, ...], torch.dtype]]]
    posted: deque[tuple[list[dist.Work], list[torch.Tensor]]]

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self.group, self.peer, self.device, self.carrier = group, peer, device, device
        dist.recv(torch.zeros(1, device=device), peer, group)
        self.coming, self.posted = iter(()), deque()

    def expect(self, messages: Iterable[Sequence[tuple[tuple[int, ...], torch.dtype]]]) -> None:
        """Post receives for the messages that will come, in order.

        Args:
            messages: for each message its tensors, as (shape, dtype) pairs.
        """
        self.coming, self.posted = iter(messages), deque()
        for _ in range(ahead(self.carrier)):
            self._post()

    def _post(self):
        message = next(self.coming, None)
        if message is not None:
            tensors = [
                torch.empty(shape, dtype=dtype, device=self.carrier) for shape, dtype in message
            ]
            works = [dist.irecv(tensor, self.peer, self.group) for tensor in tensors]
            self.posted.append((works, tensors))

    def take(self) -> list[torch.Tensor]:
        """Wait for the next message, and return its tensors."""
        works, tensors = self.posted.popleft()
        _wait(works, tensors)
        self._post()
        return [tensor.to(self.device) for tensor in tensors]

    def flush(self) -> None:
        """Do nothing: everything that was expected has been taken."""

    def close(self) -> None:
        """Drop the group, and the messages that will not come."""
        self.group = None
        self.posted.clear()
