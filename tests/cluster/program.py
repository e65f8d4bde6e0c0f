"""What the launchers start: our kernels on a group that ``distributed.join`` made."""

import sys

import torch
import torch.distributed as dist

from naranhi import collectives, distributed

device = distributed.join(timeout=60)
rank, world_size = dist.get_rank(), dist.get_world_size()
ours = torch.arange(10.0, device=device) * (rank + 1)
theirs = ours.clone()
collectives.all_reduce(ours)
dist.all_reduce(theirs)
assert torch.equal(ours, theirs)
parts = torch.empty(world_size, 3, device=device)
collectives.all_gather(parts, torch.full((3,), float(rank), device=device))
assert parts[:, 0].tolist() == list(range(world_size))
# In one write, so that the lines of two ranks do not mix where output is unbuffered.
sys.stdout.write(f"rank {rank} of {world_size}: {int(ours[1])}\n")
dist.destroy_process_group()
