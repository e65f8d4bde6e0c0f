"""Random numbers in tensor parallelism: the same on all ranks outside the split region, others in
it.

Outside, every rank of the group has the same activations: dropout must take the same of them, or
the ranks' copies part. Inside, each rank has another part: were the numbers the same there, then
those of one head, or one position, would be those of another.

Both come from torch's own generators, which stand alike on all ranks when these were seeded alike:
on the way into the region each rank draws one number, the same everywhere, and adds its rank to it;
that seeds the numbers inside; on the way out the generator is put back. So there is no further
state to save, or to restore for recomputation.

Compare Shoeybi et al. (2019), appendix B.2, which keep a second state for the region.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from naranhi.tensor_parallel.mappings import stays


@contextmanager
def fork_rng(x, group=None):
    """Inside, random numbers on x's device are others on each rank of the group. Outside it is as
    if one number had been drawn on the CPU."""
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


class ShardedDropout(nn.Dropout):
    """Dropout inside the split region: each rank of the group draws numbers of its own."""

    def __init__(self, p, group=None, inplace=False):
        super().__init__(p, inplace)
        self.group = group

    def forward(self, x):
        if not (self.training and self.p):
            return x
        with fork_rng(x, self.group):
            return super().forward(x)
