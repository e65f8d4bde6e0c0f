"""Layers of any speed: real arithmetic, then a wait, as if each rank had a device of its own.

With fewer cores than ranks, the time of a step tells how the cores were shared. Units: seconds.
"""

from math import isfinite
from time import perf_counter, sleep

import torch

from naranhi.autograd import Splittable


class Paced(Splittable):
    """A layer on a device of a given speed: real arithmetic, then a wait until its time is over.

        Paced(layer, forward=0.02, backward=0.04)

    Waiting takes no core. So four ranks that share two cores take as long as four devices would, if
    only the arithmetic is quick against the times. `late` counts how often it was not, and the time
    therefore longer: it should stay 0.

    layer: takes and returns tensors or tuples of tensors. Its results and gradients stay the same.
    forward, backward: seconds, in which a GPU has finished too.
    input_grad, weight_grad: those of a backward that is split (see `Splittable`), by default half
    of `backward` each.

    Raises ValueError for a time that is negative or not finite, TypeError for a layer that returns
    anything else.
    """

    def __init__(self, layer, forward, backward, input_grad=None, weight_grad=None):
        super().__init__(layer)
        self.times = {
            "forward": forward,
            "backward": backward,
            "input_grad": backward / 2 if input_grad is None else input_grad,
            "weight_grad": backward / 2 if weight_grad is None else weight_grad,
        }
        for name, seconds in self.times.items():
            if not (isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name} is a time in seconds, 0 or more, not {seconds!r}")
        self.late = 0

    def done(self, start, what):
        """Return when `what` has taken its time since `start`."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # not for messages on other streams
        left = start + self.times[what] - perf_counter()
        self.late += left < 0
        sleep(max(0.0, left))
