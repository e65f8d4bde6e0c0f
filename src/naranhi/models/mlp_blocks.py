"""A deep MLP as a list of layers, each of which takes one tensor and returns one."""

from torch import nn
from torch.nn import functional as F


class MLPBlock(nn.Module):
    """x + down(gelu(up(x))): (..., hidden) in and out; `inner` wide in between."""

    def __init__(self, hidden, inner):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def mlp(blocks, hidden, inner=None):
    """`blocks` layers of hidden -> inner -> hidden, inner being 4 * hidden by default.

    What a Transformer is without its attention, and the honest stand-in for one where only the
    arithmetic and the messages matter. Weights are drawn from torch's generator.
    Raises ValueError for a number below 1.
    """
    inner = 4 * hidden if inner is None else inner
    if min(blocks, hidden, inner) < 1:
        raise ValueError(f"blocks, hidden and inner are at least 1, not {blocks, hidden, inner}")
    return [MLPBlock(hidden, inner) for _ in range(blocks)]
