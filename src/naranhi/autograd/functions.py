"""Four `autograd.Function`s: an operation's author chooses what it saves for its backward.

The backward of `y = f(x)` receives dL/dy and computes dL/dx. What it needs besides dL/dy must be
saved from the forward until then: sometimes the input, sometimes the output, which the next
operation may save anyway, and sometimes something smaller than either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx


class ReLU(torch.autograd.Function):
    """`ReLU.apply(x)`: max(x, 0), any shape. Saves its output, as torch's own does.

    dL/dx is dL/dy where y > 0 and 0 elsewhere, so the input is not needed. A Linear that follows
    saves the same y as its input, so the two share one storage.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        """Return max(x, 0)."""
        y = x.clamp(min=0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        """Return dL/dx."""
        (y,) = ctx.saved_tensors
        return gradient.masked_fill(y <= 0, 0)


class MaskedReLU(torch.autograd.Function):
    """`MaskedReLU.apply(x)`: max(x, 0), any shape. Saves one byte per element: x <= 0.

    The mask is smaller than the output by a factor of the output's element size in bytes. Saving
    the output costs nothing, however, if the next layer saves it anyway.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        """Return max(x, 0)."""
        closed = x <= 0
        ctx.save_for_backward(closed)
        return x.masked_fill(closed, 0)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        """Return dL/dx."""
        (closed,) = ctx.saved_tensors
        return gradient.masked_fill(closed, 0)


class MaxPool2d(torch.autograd.Function):
    """`MaxPool2d.apply(x, window, stride)`: the maximum of each window of x.

    Elements that do not fill a window are left out, as in torch. Among equal maxima the first one
    counts, in row-major order.

    Saves the position of each maximum in its window, and not the input: one byte per result for
    windows up to 16 x 16, eight for larger ones. (Torch's own saves the input and eight bytes per
    result.)

    Args:
        x: (batch, channels, height, width).
        window: the side of the square windows, in elements.
        stride: the distance between windows, in elements; by default `window`.

    Returns:
        (batch, channels, rows, columns), with rows = (height - window) // stride + 1 and
        columns = (width - window) // stride + 1.

    Raises:
        ValueError: if x does not have four dimensions, or the window or stride does not fit.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, window: int, stride: int | None = None
    ) -> torch.Tensor:
        """Return the maxima."""
        stride = window if stride is None else stride
        if x.dim() != 4:
            raise ValueError(f"x is (batch, channels, height, width), not {tuple(x.shape)}")
        if not 1 <= window <= min(x.shape[2:]) or stride < 1:
            raise ValueError(
                "window and stride must be at least 1, and the window no larger than height and "
                f"width: window {window}, stride {stride}, x of shape {tuple(x.shape)}"
            )
        windows = x.unfold(2, window, stride).unfold(3, window, stride).flatten(-2)
        place = windows.argmax(-1, keepdim=True)
        ctx.shape, ctx.window, ctx.stride = x.shape, window, stride
        ctx.save_for_backward(place.squeeze(-1).to(torch.uint8 if window <= 16 else torch.int64))
        return windows.gather(-1, place).squeeze(-1)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return dL/dx, and None for the window and the stride."""
        place = ctx.saved_tensors[0].long()
        rows, columns = (
            torch.arange(size, device=place.device) * ctx.stride for size in place.shape[2:]
        )
        row = rows[:, None] + place // ctx.window
        column = columns + place % ctx.window
        batch, channels, height, width = ctx.shape
        # Windows that overlap may share a maximum, so their gradients are summed.
        result = gradient.new_zeros(batch, channels, height * width).scatter_add(
            2, (row * width + column).flatten(2), gradient.flatten(2)
        )
        return result.view(ctx.shape), None, None


class Dropout(torch.autograd.Function):
    """`Dropout.apply(x, probability)`: 0 with that probability, the other elements scaled up.

    Saves one byte per element: whether the element was kept. (On a GPU torch's own does so too; on
    a CPU it saves the factors, in the dtype of x.)

    Args:
        x: any shape.
        probability: that an element becomes 0; the others are divided by 1 - probability.

    Raises:
        ValueError: for a probability outside of [0, 1).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, probability: float) -> torch.Tensor:
        """Return x with some elements 0 and the others scaled up."""
        if not 0 <= probability < 1:
            raise ValueError(f"a probability in [0, 1), not {probability!r}")
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - probability)
        ctx.scale = 1 / (1 - probability)
        ctx.save_for_backward(kept)
        return x * kept * ctx.scale

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return dL/dx, and None for the probability."""
        (kept,) = ctx.saved_tensors
        return gradient * kept * ctx.scale, None


class FunctionLayer(nn.Module):
    """A function as a layer: `FunctionLayer(MaxPool2d.apply, 2)` stands in for nn.MaxPool2d(2).

    Args:
        function: called with the layer's input, then `arguments`.
        *arguments: the function's other arguments, the same in every call.
    """

    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]

    def __init__(self, function: Callable[..., torch.Tensor], *arguments: Any) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return function(x, *arguments)."""
        return self.function(x, *self.arguments)
