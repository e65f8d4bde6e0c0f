"""Random numbers in tensor parallelism: equal on all ranks outside the split region, not inside.

Outside, every rank of the group has the same activations, and needs the same dropout mask, or the
ranks' copies diverge. Inside, each rank has a different part of the activations, and needs a
different mask; otherwise two heads, or two positions, would share one.

Both kinds come from torch's own generators, which have the same state on all ranks if they were
seeded alike. On entering the region, each rank draws one number (the same on every rank), adds its
rank, and seeds the generator with the sum. On leaving, it restores the generator's state. So no
other state has to be saved, or restored for recomputation.

Compare Shoeybi et al. (2019), appendix B.2, who keep a second RNG state for the region.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from naranhi.distributed.shared_groups import SharesGroups
from naranhi.tensor_parallel.mappings import stays


@contextmanager
def fork_rng(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Draw different random numbers on each rank of the group inside, on x's device.

    Outside, the only effect is that of one number drawn on the CPU.
    """
    if stays(x, group):
        yield
        return
    seed = torch.randint(2**31, (), device="cpu").item() + dist.get_rank(group)
    generator = (
        torch.cuda.default_generators[x.get_device()] if x.is_cuda else torch.default_generator
    )
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


class ShardedDropout(SharesGroups, nn.Dropout):
    """Dropout inside the split region: each rank of the group draws its own random numbers.

    Args:
        p: the probability of dropping an element.
        group: the process group; None for the default one.
        inplace: see `nn.Dropout`.
    """

    def __init__(self, p: float, group: dist.ProcessGroup | None = None, inplace: bool = False):
        super().__init__(p, inplace)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with elements dropped, in training; else x itself."""
        if not (self.training and self.p):
            return x
        with fork_rng(x, self.group):
            return super().forward(x)
