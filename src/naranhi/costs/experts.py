"""What a mixture of experts sends, and how long it takes, if its experts are on different ranks.

Each of a rank's tokens goes to `top_k` experts, as a row of `hidden` elements, by one all-to-all,
and comes back by another one. The backward does both again with the gradients. A row that stays on
its rank is not sent. Units: bytes, seconds, operations per second.

The formulas that take numbers of tokens assume an even routing: every rank sends every rank as many
rows. Those that take `rows` hold for any routing: `rows[i][j]` is how many rows rank i sends to
rank j in a dispatch.
"""

from collections.abc import Sequence

from naranhi.costs.communication import bytes_sent

FORWARD, BACKWARD = 2, 2  # all-to-alls of a layer
MOE_EXCHANGES = FORWARD + BACKWARD


def moe_bytes_sent(
    tokens: int,
    hidden: int,
    top_k: int,
    ranks: int,
    *,
    element_bytes: int = 4,
    backward: bool = True,
) -> float:
    """Return the bytes that a rank sends for one layer, if the routing is even.

    Args:
        tokens: the tokens of this rank.
        hidden: the elements of a token.
        top_k: the experts of a token.
        ranks: the ranks over which the experts are divided.
        element_bytes: the bytes of an element.
        backward: whether to count the backward, too.
    """
    rows = tokens * top_k * hidden * element_bytes
    return (FORWARD + BACKWARD * backward) * bytes_sent("all_to_all", rows, ranks)


def moe_rows_sent(rows: Sequence[Sequence[int]], rank: int, *, backward: bool = True) -> int:
    """Return how many rows a rank sends for one layer, whatever the routing.

    In a dispatch it sends the rows of its tokens, in a combine the results of the other ranks'
    tokens; in the backward the gradients of both.

    Args:
        rows: `rows[i][j]` rows go from rank i to rank j in the dispatch.
        rank: the rank.
        backward: whether to count the backward, too.
    """
    leaving = sum(rows[rank]) - rows[rank][rank]
    arriving = sum(sent[rank] for sent in rows) - rows[rank][rank]
    return (1 + backward) * (leaving + arriving)


def moe_count_bytes_sent(experts: int, top_k: int, ranks: int) -> int:
    """Return the bytes that a rank sends to announce what its tokens chose, once per forward.

    Args:
        experts: the experts of the layer: each has a count per choice and a probability.
        top_k: the choices of a token.
        ranks: the ranks over which the experts are divided; these numbers go round a ring.
    """
    return 8 * (experts * (top_k + 1) + 1) * (ranks - 1)


def gathered_experts_bytes_sent(
    hidden: int,
    ffn: int,
    experts: int,
    ranks: int,
    *,
    element_bytes: int = 4,
    backward: bool = True,
) -> float:
    """Return the bytes that a rank sends if experts move to the tokens, as in ZeRO-3.

    Every rank all-gathers all experts in the forward. In the backward it gathers them again, and
    their gradients are reduce-scattered.

    Args:
        hidden: the elements of a token.
        ffn: the size inside an expert, which has 2 x hidden x ffn weights.
        experts: the experts of the layer.
        ranks: the ranks over which the experts are sharded.
        element_bytes: the bytes of an element.
        backward: whether to count the backward, too.
    """
    weights = 2 * hidden * ffn * experts * element_bytes
    return (3 if backward else 1) * bytes_sent("all_gather", weights, ranks)


def break_even_tokens(ffn: int, experts: int, top_k: int, *, backward: bool = True) -> float:
    """Return the tokens of a rank for which moving tokens and gathering experts send as much.

    With fewer tokens it is cheaper to move them. The hidden size, the bytes of an element and the
    number of ranks cancel.

    Args:
        ffn: the size inside an expert.
        experts: the experts of the layer.
        top_k: the experts of a token.
        backward: whether to count the backward, too.
    """
    gathers, exchanges = (3, FORWARD + BACKWARD) if backward else (1, FORWARD)
    return gathers * 2 * ffn * experts / (exchanges * top_k)


def imbalance(rows: Sequence[Sequence[int]]) -> float:
    """Return the rows of the busiest rank over the mean: 1 if even, at most the number of ranks.

    Args:
        rows: `rows[i][j]` rows go from rank i to rank j in the dispatch.

    Raises:
        ValueError: there are no rows.
    """
    computed = [sum(sent[rank] for sent in rows) for rank in range(len(rows))]
    if not sum(computed):
        raise ValueError("no rank has a row, so no rank is busier than another")
    return max(computed) * len(computed) / sum(computed)


def moe_seconds(
    rows: Sequence[Sequence[int]],
    hidden: int,
    ffn: int,
    *,
    flops: float,
    alpha: float,
    beta: float,
    element_bytes: int = 4,
) -> float:
    """Return the seconds of a layer's forward and backward, which are those of the busiest ranks.

    The all-to-alls wait for the rank that sends or receives the most, the combine for the rank that
    computes the most. Nothing overlaps.

    Args:
        rows: `rows[i][j]` rows go from rank i to rank j in the dispatch.
        hidden: the elements of a token.
        ffn: the size inside an expert.
        flops: what a rank computes, in operations per second. A row takes 4 x hidden x ffn of them
            in the forward and twice as many in the backward.
        alpha: the seconds that a message takes to start.
        beta: the seconds of each byte.
        element_bytes: the bytes of an element.
    """
    ranks = range(len(rows))
    computed = max(sum(sent[rank] for sent in rows) for rank in ranks)
    leaving = (sum(rows[rank]) - rows[rank][rank] for rank in ranks)
    arriving = (sum(sent[rank] for sent in rows) - rows[rank][rank] for rank in ranks)
    moved = max(*leaving, *arriving) * hidden * element_bytes
    sending = MOE_EXCHANGES * ((len(rows) - 1) * alpha + moved * beta)
    return sending + computed * 12 * hidden * ffn / flops
