"""Layers of any speed: real arithmetic, then a wait, as if each rank had a device of its own.

With fewer cores than ranks, a step's time would only show how cores were shared. Units: seconds.
"""

from __future__ import annotations

from math import isfinite
from time import perf_counter, sleep

import torch
from torch import nn

from naranhi.autograd import Splittable


class Paced(Splittable):
    """A layer on a device of a given speed: real arithmetic, then a wait until its time is over.

        Paced(layer, forward=0.02, backward=0.04)

    Waiting needs no core. So four ranks that share two cores are as fast as four devices, as long
    as the arithmetic is short compared to the times.

    Args:
        layer: takes and returns tensors or tuples of tensors. Its results and gradients stay the
            same.
        forward: the seconds of a forward, the work of a GPU included.
        backward: the seconds of a backward, the work of a GPU included.
        input_grad: the seconds of the inputs' part of a backward that is split (see `Splittable`);
            by default half of `backward`.
        weight_grad: the seconds of the weights' part; by default half of `backward`.

    Attributes:
        late: how often the arithmetic took longer than the given time; it should stay 0.

    Raises:
        ValueError: for a time that is negative or not finite.
        TypeError: for a layer that returns anything but tensors or tuples of tensors.
    """

    def __init__(
        self,
        layer: nn.Module,
        forward: float,
        backward: float,
        input_grad: float | None = None,
        weight_grad: float | None = None,
    ) -> None:
        super().__init__(layer)
        self.times: dict[str, float] = {
            "forward": forward,
            "backward": backward,
            "input_grad": backward / 2 if input_grad is None else input_grad,
            "weight_grad": backward / 2 if weight_grad is None else weight_grad,
        }
        for name, seconds in self.times.items():
            if not (isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name} is a time in seconds, 0 or more, not {seconds!r}")
        self.late: int = 0

    def done(self, start: float, what: str) -> None:
        """Wait until `what` has taken its time since `start`."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # does not wait for messages on other streams
        left = start + self.times[what] - perf_counter()
        self.late += left < 0
        sleep(max(0.0, left))
