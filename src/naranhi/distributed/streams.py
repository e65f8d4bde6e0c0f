"""Work beside the current stream: started now, waited for later, as with `async_op=True`.

    later = start(copy_to_gpu, host, stream=side)   # returns at once
    loss = model(batch)                             # meanwhile, on the current stream
    batch = later.wait()                            # what comes from now on waits for the copy

Streams know nothing of each other, and the allocator knows only the stream that a tensor was made
on. So four things are easily forgotten, and done here: the side stream waits for the current one
where it reads what that has made; the current one waits for the side stream; and memory that the
other stream may still be busy with is not given away, be it what goes in or what comes out.

Source: the notes on CUDA semantics and on `Tensor.record_stream` in PyTorch's documentation.
"""

import torch


def start(function, *tensors, stream=None):
    """Queue `function(*tensors)`, which returns a tensor, on `stream`: a `Later`, at once.

    tensors: all that the function reads. Those on a GPU must not be written to before the wait, and
    nor must those in pinned host memory, which a copy with `non_blocking=True` reads meanwhile.
    stream: a `torch.cuda.Stream`, worth keeping for the next time; None runs the function here and
    now, as everything runs where there is no GPU.
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
    """A tensor that another stream is still busy with."""

    def __init__(self, result, done):
        self._result, self._done = result, done

    def wait(self):
        """The tensor, for the current stream: what is queued there from now on comes after it.

        The CPU does not wait, unless the tensor is the CPU's.
        """
        if self._done is not None and self._result.is_cuda:
            current = torch.cuda.current_stream(self._result.device)
            current.wait_event(self._done)
            self._result.record_stream(current)
        elif self._done is not None:
            self._done.synchronize()
        return self._result
