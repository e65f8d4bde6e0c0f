"""Context parallelism: attention over a sequence that is cut across ranks.

Each rank has the queries, keys and values of some positions, but needs every key and value.
Three ways to bring them together, with the same arguments and the same result:

    ring_attention       blocks of keys and values go round the ranks; partial results are merged
    gathered_attention   every rank gathers all keys and values
    ulysses_attention    each rank gets all positions of some of the heads

Everything else in a Transformer works on each position alone. `split_sequence` and `positions` say
which positions a rank has. As in data parallelism, sum the gradients of weights over the ranks, and
divide the loss by the number of valid tokens on all ranks (`data_parallel.global_count`).

Bytes, messages, memory and the idle share of a causal ring are in `naranhi.costs`.
"""

from naranhi.context_parallel.cut import cut_sequence
from naranhi.context_parallel.gathered import gathered_attention
from naranhi.context_parallel.order import ORDERS, join_sequence, positions, split_sequence
from naranhi.context_parallel.ring import ring_attention
from naranhi.context_parallel.ulysses import ulysses_attention

__all__ = [
    "ORDERS",
    "cut_sequence",
    "gathered_attention",
    "join_sequence",
    "positions",
    "ring_attention",
    "split_sequence",
    "ulysses_attention",
]
