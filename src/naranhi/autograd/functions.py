"""What an operation saves for its backward is its author's choice: four `autograd.Function`s.

The backward of `y = f(x)` is given dL/dy and has to find dL/dx. What it needs for that, besides
dL/dy, has to be kept from the forward until then: sometimes the input, sometimes the output, which
the next operation may be keeping anyway, and sometimes something smaller than either.
"""

import torch
from torch import nn


class ReLU(torch.autograd.Function):
    """`ReLU.apply(x)`: max(x, 0), any shape. Saves its output, as torch's own does.

    dL/dx is dL/dy where y > 0 and nothing elsewhere: the input is not needed. And a Linear that
    follows keeps the same y as its input, so that the two hold one storage between them.
    """

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(min=0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient.masked_fill(y <= 0, 0)


class MaskedReLU(torch.autograd.Function):
    """`MaskedReLU.apply(x)`: max(x, 0), any shape. Saves one byte an element: where x <= 0.

    Smaller than the output by the size of an element, and still more than nothing, which is what
    saving the output costs when the next layer keeps it anyway.
    """

    @staticmethod
    def forward(ctx, x):
        closed = x <= 0
        ctx.save_for_backward(closed)
        return x.masked_fill(closed, 0)

    @staticmethod
    def backward(ctx, gradient):
        (closed,) = ctx.saved_tensors
        return gradient.masked_fill(closed, 0)


class MaxPool2d(torch.autograd.Function):
    """`MaxPool2d.apply(x, window, stride=window)`: the largest of each window of x.

    x: (batch, channels, height, width); the result: (batch, channels, rows, columns), with rows =
    (height - window) // stride + 1 and columns likewise; what does not fill a window is left out,
    as in torch. Among equals the first counts, row by row.

    Saves where in its window each maximum stood: one byte a result for windows up to 16 x 16, eight
    for larger ones, and not the input (torch's keeps the input and eight bytes a result).

    Raises ValueError for another number of dimensions, or a window or stride that does not fit.
    """

    @staticmethod
    def forward(ctx, x, window, stride=None):
        stride = window if stride is None else stride
        if x.dim() != 4:
            raise ValueError(f"x is (batch, channels, height, width), not {tuple(x.shape)}")
        if not 1 <= window <= min(x.shape[2:]) or stride < 1:
            raise ValueError(
                f"a window of {window} with stride {stride} does not fit into {tuple(x.shape)}"
            )
        windows = x.unfold(2, window, stride).unfold(3, window, stride).flatten(-2)
        place = windows.argmax(-1, keepdim=True)
        ctx.shape, ctx.window, ctx.stride = x.shape, window, stride
        ctx.save_for_backward(place.squeeze(-1).to(torch.uint8 if window <= 16 else torch.int64))
        return windows.gather(-1, place).squeeze(-1)

    @staticmethod
    def backward(ctx, gradient):
        place = ctx.saved_tensors[0].long()
        rows, columns = (
            torch.arange(size, device=place.device) * ctx.stride for size in place.shape[2:]
        )
        row = rows[:, None] + place // ctx.window
        column = columns + place % ctx.window
        batch, channels, height, width = ctx.shape
        # Windows that overlap may share a maximum: their gradients add up.
        result = gradient.new_zeros(batch, channels, height * width).scatter_add(
            2, (row * width + column).flatten(2), gradient.flatten(2)
        )
        return result.view(ctx.shape), None, None


class Dropout(torch.autograd.Function):
    """`Dropout.apply(x, probability)`: zeros with that probability, the rest scaled to make up.

    x: any shape. Saves one byte an element: whether it was kept. (On a GPU torch's own does so too;
    on a CPU it keeps the factors, as wide as x.)

    Raises ValueError for a probability outside of [0, 1).
    """

    @staticmethod
    def forward(ctx, x, probability):
        if not 0 <= probability < 1:
            raise ValueError(f"a probability in [0, 1), not {probability!r}")
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - probability)
        ctx.scale = 1 / (1 - probability)
        ctx.save_for_backward(kept)
        return x * kept * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return gradient * kept * ctx.scale, None


class FunctionLayer(nn.Module):
    """A function as a layer: `FunctionLayer(MaxPool2d.apply, 2)` stands in for nn.MaxPool2d(2)."""

    def __init__(self, function, *arguments):
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, x):
        return self.function(x, *self.arguments)
