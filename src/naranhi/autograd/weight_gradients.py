"""The gradients of a layer's weights, which a backward leaves for later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

import torch

from naranhi.autograd.parameter_hooks import at_rest, has_hooks, wait_for_gradient

# Where a backward starts (a tensor or a place in the graph), and the gradient there.
Start = tuple[torch.Tensor | torch.autograd.graph.GradientEdge, torch.Tensor]


class Later:
    """The gradients of a layer's weights that one backward leaves for later.

    Calling this object computes the gradients and adds them to `.grad`. Several uses of the layer
    in that backward are computed together, so hooks of the weights run once, on the sum. Until then
    the hooks wait, because autograd would run them on the None that it receives for now.

    Args:
        defer: called with this object as soon as the first gradient is left.
        name: the layer's name in errors.
        done: as `Splittable.done`.
    """

    defer: Callable[[Later], None]

    def __init__(
        self,
        defer: Callable[[Later], None],
        name: str,
        done: Callable[[float, str], None],
    ) -> None:
        self.defer, self._name, self._done = defer, name, done
        self._left, self._waiting = [], []

    def leave(
        self,
        weights: Iterable[torch.Tensor],
        starts: Callable[[], list[Start]],
        is_own: bool = False,
    ) -> None:
        """Leave the gradients of these weights from one use of the layer.

        Args:
            weights: the weights that this use has.
            starts: returns where a backward to the weights starts, and the gradients there.
            is_own: whether that backward starts at the weights themselves, with gradients that
                share no storage with another tensor.
        """
        for weight in filter(has_hooks, weights):
            name = f"a parameter {tuple(weight.shape)} of {self._name}"
            self._waiting.append(wait_for_gradient(weight, name))
        self._left.append((weights, starts, is_own))
        if len(self._left) == 1:
            self.defer(self)

    def end(self) -> None:
        """Let the weights' hooks run again."""
        while self._waiting:
            self._waiting.pop()()

    def __call__(self) -> None:
        """Compute the gradients that were left, and add them to `.grad`."""
        self.end()
        start, left = perf_counter(), self._left
        self._left = []
        if len(left) == 1:
            ((weights, starts_of, is_own),) = left
            starts = starts_of()
        else:
            starts, is_own = _sum_uses(left), False
            weights = [weight for weight, _ in starts]
        if is_own and not any(has_hooks(weight) for weight, _ in starts):
            _add(starts)  # 5 us, where the engine needs 25
        elif starts and weights:
            # The engine copies: a gradient may share its storage with the input's gradient, whose
            # send may be in flight.
            torch.autograd.backward(*zip(*starts, strict=True), inputs=weights)
        for _ in left:
            self._done(start, "weight_grad")
            start = perf_counter()


class Sharing:
    """Layers that share a parameter, whose gradients from one backward are computed together."""

    def __init__(self) -> None:
        self._begun = None

    def join(self, later: Later) -> Later:
        """Return the `Later` with which a backward of these layers began; it may be `later`."""
        if self._begun is None or self._begun.defer != later.defer:
            self._begun = later
        return self._begun


@torch.no_grad()
def _add(starts):
    for weight, grad in starts:
        if weight.grad is None:
            # As autograd does: fused optimizers assume that a gradient has its weight's strides.
            same = grad.stride() == weight.stride()
            weight.grad = grad if same else torch.empty_like(weight).copy_(grad)
        else:
            weight.grad += grad


def _sum_uses(left):
    """Return [(weight, gradient)], summed over uses in the backward's order, as autograd does."""
    sums = {}
    for weights, starts_of, is_own in left:
        starts = starts_of()
        if not is_own:
            starts = _gradients(starts, weights)
        for weight, grad in starts:
            sums[weight] = sums[weight] + grad if weight in sums else grad
    return list(sums.items())


def _gradients(starts, weights):
    if not (starts and weights):
        return []
    places, given = zip(*starts, strict=True)
    with at_rest(weights):  # their hooks must see the sum
        grads = torch.autograd.grad(places, weights, given, allow_unused=True)
    return [pair for pair in zip(weights, grads, strict=True) if pair[1] is not None]
