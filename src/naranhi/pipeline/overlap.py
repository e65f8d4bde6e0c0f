"""Run the forward and the backward of a pair (`schedules.Overlap`) at the same time.

What overlaps is waiting: while the layers of one wait for messages, those of the other compute. The
all-to-alls of a mixture of experts are what DualPipe hides in this way.

Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

import torch

from naranhi.autograd.recomputation import GENERATOR

Tensors = list[torch.Tensor]


def in_threads(
    forward: Callable[[], Tensors], backward: Callable[[], Tensors]
) -> tuple[Tensors, Tensors]:
    """Run a forward in a new thread and a backward in this thread; return both results.

    The forward has the caller's grad mode, inference mode, autocast and stream. Both use the random
    numbers of one generator, and on a GPU one stream. So dropout masks differ from run to run, and
    kernels of the two do not overlap: there, pass `Pipeline` a function that uses two streams.
    Layers that communicate need one process group for forwards and another for backwards, because
    ranks must call the collectives of a group in one order.

    A recomputation (`autograd.Recompute`) waits until the forward is over, because it restores the
    generator from which the forward draws. So recomputed layers must not communicate, and overlap
    less. `torch.utils.checkpoint` does not wait: use it only with layers that draw nothing.
    """
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    kinds, stream = ["cpu"], nullcontext()
    if torch.accelerator.is_available():
        kinds.append(torch.accelerator.current_accelerator().type)
        stream = torch.accelerator.current_stream()  # and its device, not the first GPU
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
    ]

    def run():
        with ExitStack() as stack:
            stack.enter_context(stream)
            stack.enter_context(GENERATOR)
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for of_kind in autocast:
                stack.enter_context(torch.autocast(*of_kind))
            return forward()

    with ThreadPoolExecutor(1) as thread:
        outputs = thread.submit(run)
        gradients = backward()
        return outputs.result(), gradients
