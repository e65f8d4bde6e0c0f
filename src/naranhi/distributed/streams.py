"""Work on a side stream: started now, waited for later, as with `async_op=True`.

    later = start(copy_to_gpu, host, stream=side)   # returns at once
    loss = model(batch)                             # meanwhile, on the current stream
    batch = later.wait()                            # work queued from now on waits for the copy

Streams do not wait for each other by themselves, and the allocator knows only the stream that a
tensor was made on. So four steps are easily forgotten, and are done here: the side stream waits for
the current stream if it reads what the current stream made; the current stream waits for the side
stream; and the memory of the inputs, and of the result, is not reused while the other stream may
still use it.

Source: the notes on CUDA semantics and on `Tensor.record_stream` in PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def start(
    function: Callable[..., torch.Tensor],
    *tensors: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> Later:
    """Queue `function(*tensors)` on `stream` and return at once.

    Do not write to `tensors` on the GPU before `wait()`. Pinned host memory that a copy with
    `non_blocking=True` reads needs more, because `wait()` makes the current stream wait, and not
    the CPU: call `stream.synchronize()` before you write to it.

    Args:
        function: what to run; it returns a tensor.
        *tensors: all tensors that the function reads.
        stream: the side stream; reuse it in later calls. None runs the function at once on the
            current stream; pass None without a GPU, too.

    Returns:
        A handle, whose `wait()` returns the function's result.
    """
    if stream is None:
        return Later(function(*tensors), None)
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    if on_gpu:  # a copy from the host may overtake what is queued here
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    for tensor in on_gpu:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        return Later(function(*tensors), stream.record_event())


class Later:
    """A tensor that another stream may still be computing.

    Args:
        result: the tensor.
        done: the event after which the tensor is complete; None if it is complete already.
    """

    def __init__(self, result: torch.Tensor, done: torch.cuda.Event | None):
        self._result, self._done = result, done

    def wait(self) -> torch.Tensor:
        """Return the tensor; work queued on the current stream from now on comes after it.

        The CPU does not wait, unless the tensor is on the CPU.
        """
        if self._done is not None and self._result.is_cuda:
            current = torch.cuda.current_stream(self._result.device)
            current.wait_event(self._done)
            self._result.record_stream(current)
        elif self._done is not None:
            self._done.synchronize()
        return self._result
