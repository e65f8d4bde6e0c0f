"""What attention over a sequence cut across ranks sends and keeps, and how long ranks stand idle.

Three ways: "ring", "gathered" and "ulysses", as in `naranhi.context_parallel`. Units: bytes. Per
rank and per attention, forward and backward together, with n ranks, b rows, a sequence of s tokens,
h heads of d values, k key-value heads and e bytes per value, the bytes sent are

    ring        6 (n - 1)/n    b s d e k         keys and values twice, their gradients once
    gathered    4 (n - 1)/n    b s d e k         keys and values once, their gradients once
    ulysses     4 (n - 1)/n^2  b s d e (h + k)   queries, keys, values and outputs, each way

if values have 4 bytes or more. (Gradients of keys and values are summed on the way, and have at
least 4: with e = 2 the ring's 6 is an 8, and gathering's 4 is a 6.)

So Ulysses sends less than gathered keys and values from n > 1 + h/k ranks on, and less than the
ring from n > (1 + h/k) 2/3 on. But the ranks must divide the key-value heads, so n is at most k.
"""

from naranhi.costs.communication import checked_arguments

CONTEXT_WAYS = ("ring", "gathered", "ulysses")


def context_bytes_sent(
    way: str,
    ranks: int,
    *,
    sequence: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    batch: int = 1,
    element: int = 2,
    backward: bool = True,
) -> float:
    """Return the bytes that each rank sends for one attention, and receives.

    Args:
        way: "ring", "gathered" or "ulysses".
        ranks: The number of ranks that share the sequence.
        sequence: The tokens of the whole sequence.
        heads: The number of (query) heads.
        kv_heads: The number of key-value heads.
        head_size: The values of a head.
        batch: The number of sequences.
        element: The bytes of a value. Gradients of keys and values are summed, and sent, in 4 bytes
            at least by the ring and by gathered attention.
        backward: Whether to count the backward too.

    Raises:
        ValueError: If the way is unknown, the heads are not a multiple of the key-value heads, or
            this way does not run on this number of ranks.
    """
    _check(way, ranks, heads, kv_heads)
    values = batch * sequence * head_size / ranks  # of a head on one rank
    if way == "ulysses":  # a rank keeps its own part of what it exchanges
        once = 2 * (heads + kv_heads) * values * element * (ranks - 1) / ranks
        return (1 + backward) * once
    block = 2 * kv_heads * values
    gradients = block * max(element, 4)
    again = block * element if way == "ring" else 0.0
    return (ranks - 1) * (block * element + backward * (again + gradients))


def context_messages(way: str, ranks: int, *, backward: bool = True) -> int:
    """Return the messages that each rank sends for one attention.

    Messages that are long enough to be cut into chunks count once. Arguments and errors are those
    of `context_bytes_sent`.
    """
    _check(way, ranks)
    each_way = {"ring": (1, 2), "gathered": (1, 1), "ulysses": (2, 2)}[way]
    return (ranks - 1) * sum(each_way[: 1 + backward])


def context_bytes_saved(
    way: str,
    ranks: int,
    *,
    sequence: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    batch: int = 1,
    element: int = 2,
) -> float:
    """Return the bytes that each rank keeps of one attention for its backward.

    These are queries, keys, values, output and the log-sum-exp (at least 4 bytes for each query of
    each head), all of this rank's positions or heads; only gathered keys and values are whole.
    Arguments and errors are those of `context_bytes_sent`.
    """
    _check(way, ranks, heads, kv_heads)
    tokens = batch * sequence / ranks
    copies = ranks if way == "gathered" else 1
    values = (2 * heads + 2 * kv_heads * copies) * head_size
    return tokens * (values * element + heads * max(element, 4))


def context_idle(ranks: int, order: str = "plain") -> float:
    """Return the share of the ranks' time in which a causal ring stands idle, without messages.

    In "plain" order the last rank attends to all blocks before its own and to half of its own, n -
    1/2 blocks, while the mean is n/2: the share is (n - 1)/(2n - 1), below one half. In
    "head_tail" order every rank computes the same.

    Raises:
        ValueError: If the order is unknown, or `ranks` is not a positive whole number.
    """
    checked_arguments(ranks=ranks)
    if order not in ("plain", "head_tail"):
        raise ValueError(f"order must be 'plain' or 'head_tail', not {order!r}")
    return (ranks - 1) / (2 * ranks - 1) if order == "plain" else 0.0


def _check(way, ranks, heads=None, kv_heads=None):
    checked_arguments(ranks=ranks)
    if way not in CONTEXT_WAYS:
        raise ValueError(f"way must be one of {CONTEXT_WAYS}, not {way!r}")
    if heads is None:
        return
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise ValueError(f"{kv_heads} key-value heads do not divide {heads} heads")
    if way == "ulysses" and kv_heads % ranks:
        raise ValueError(f"{ranks} ranks do not divide {kv_heads} key-value heads")
