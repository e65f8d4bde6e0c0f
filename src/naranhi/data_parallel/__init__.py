"""Data parallelism: each rank has the whole model and a share of the batch; gradients are summed.

The loss of a step is a sum over valid items (tokens, rows, ...), divided by their number in the
*whole* step, over all micro-batches and ranks: `count`, as in `pipeline.Pipeline`. Each rank
divides its summed loss by that global count before its backward,

    (loss(model(inputs), targets) / global_count(valid_here)).backward()

so that the *sum* of the ranks' gradients is the average over the step, even if the shares are of
unequal size. (The mean of the ranks' means would give a token of a short share more weight.)

Three ways to sum the gradients, each with less waiting than the one before:

    all_reduce_gradients(model)    after the backward, one parameter after the other
    all_reduce_bucketed(model)     after the backward, in few long messages
    DDP(model)                     in buckets, while the backward still runs

After any of these all ranks have the same bits; with more than two ranks, the three may round
differently. The models must be equal first (`broadcast_parameters`, which `DDP` calls itself). A
parameter that has a gradient on no rank keeps none. A rank without any sample still runs its model,
on rows that do not count (for example rows whose targets are all -100) or on zero rows. `group` is
the process group, None for the default one.
"""

from naranhi.data_parallel.all_reduce import all_reduce_bucketed, all_reduce_gradients, global_count
from naranhi.data_parallel.ddp import DDP
from naranhi.data_parallel.sync import broadcast_buffers, broadcast_parameters

__all__ = [
    "DDP",
    "all_reduce_bucketed",
    "all_reduce_gradients",
    "broadcast_buffers",
    "broadcast_parameters",
    "global_count",
]
