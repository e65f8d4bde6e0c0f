"""What communication costs: bandwidths of a measurement, and the alpha-beta model of an algorithm.

Units, everywhere: seconds, bytes, bytes per second. `bytes` is the size of the *whole*: of the
tensor for broadcast, reduce and all-reduce; for the other collectives, of all ranks' blocks
together (the input of a reduce-scatter or of the root's scatter, the output of an all-gather or of
the root's gather, either side of an all-to-all).

The alpha-beta model: a message of m bytes takes `alpha + m * beta` seconds, where alpha is the
latency in seconds and beta is the inverse of the bandwidth, in seconds per byte. A rank sends one
message and receives one at a time. The model leaves out the time of the reduction itself and the
overlap of chunks: it says what the messages cost.

Sources: Hockney, "The communication challenge for MPP" (1994), for the model; Thakur, Rabenseifner
and Gropp (2005) for the trees and for halving and doubling; Patarasuk and Yuan (2009) for the ring;
nccl-tests, doc/PERFORMANCE.md, for the two bandwidths.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import isfinite
from operator import index

# The algorithms of each collective; the first is the default of the functions below.
ALGORITHMS = {
    "broadcast": ("tree",),
    "reduce": ("tree",),
    "scatter": ("direct",),
    "gather": ("direct",),
    "all_to_all": ("direct",),
    "all_gather": ("ring", "doubling"),
    "reduce_scatter": ("ring", "halving"),
    "all_reduce": ("ring", "halving_doubling", "doubling", "tree"),
}

# These work only if each step can pair all ranks. (An all-reduce first folds in the other ranks.)
POWER_OF_TWO_ONLY = {("all_gather", "doubling"), ("reduce_scatter", "halving")}


def algorithm_bandwidth(bytes: float, seconds: float) -> float:
    """Return the bytes per second that the caller sees: the size of the whole over the time.

    Raises:
        ValueError: If `bytes` is negative or `seconds` is not positive.
    """
    checked_arguments(bytes=bytes)
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, not {seconds!r}")
    return bytes / seconds


def bus_bandwidth(collective: str, bytes: float, seconds: float, ranks: int) -> float:
    """Return the bytes per second that each rank's link must carry, to compare with the hardware's.

    This is the algorithm bandwidth times 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter,
    all-gather, all-to-all, scatter and gather, and 1 for broadcast and reduce, as nccl-tests
    defines it. It counts the least that must cross the busiest link, not what an algorithm sends.
    """
    _, ranks = checked_arguments(collective, bytes, ranks)
    if collective in ("broadcast", "reduce"):
        factor = 1.0
    else:
        factor = (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
    return algorithm_bandwidth(bytes, seconds) * factor


def collective_seconds(
    collective: str,
    bytes: float,
    ranks: int,
    alpha: float,
    beta: float,
    algorithm: str | None = None,
) -> float:
    """Return the alpha-beta model's seconds: messages in a row x alpha + bytes in a row x beta.

    alpha is in seconds, beta in seconds per byte; `algorithm` is one of `ALGORITHMS[collective]`,
    by default the first.
    """
    messages, volume = _critical_path(collective, bytes, ranks, algorithm)
    return messages * alpha + volume * beta


@lru_cache(maxsize=1024)
def fastest(
    collective: str,
    bytes: float,
    ranks: int,
    alpha: float,
    beta: float,
    among: tuple[str, ...] | None = None,
) -> str:
    """Return the algorithm for which `collective_seconds` is least, the first of equals.

    `among` has the algorithms to choose from, by default all that this number of ranks can run.
    Raises ValueError where this number of ranks can run none of them.
    """
    checked_arguments(collective, bytes, ranks)
    known = [name for name in among or ALGORITHMS[collective] if _runs(collective, ranks, name)]
    if not known:
        raise ValueError(f"none of {', '.join(among)} runs {collective} on {ranks} ranks")
    return min(
        known, key=lambda name: collective_seconds(collective, bytes, ranks, alpha, beta, name)
    )


def _runs(collective, ranks, algorithm):
    return (collective, algorithm) not in POWER_OF_TWO_ONLY or ranks & (ranks - 1) == 0


def _critical_path(collective, bytes, ranks, algorithm=None):
    """Return the (messages, bytes) that follow one another, on whichever link is the busiest."""
    algorithm, ranks = checked_arguments(collective, bytes, ranks, algorithm)
    levels = (ranks - 1).bit_length()  # of a binomial tree: log2(ranks), rounded up
    if algorithm in ("doubling", "halving") and collective != "all_reduce":
        return levels, (ranks - 1) / ranks * bytes  # as many bytes as on a ring, in fewer messages
    if collective == "all_reduce":
        if algorithm == "tree":  # reduce, then broadcast
            return 2 * levels, 2 * levels * bytes
        if algorithm == "ring":  # reduce-scatter, then all-gather
            return 2 * (ranks - 1), 2 * (ranks - 1) / ranks * bytes
        # Among `core` ranks; the other ranks send their data before and receive the sum after.
        core = 2 ** (ranks.bit_length() - 1)
        extra = 2 if ranks > core else 0
        halvings = core.bit_length() - 1
        if algorithm == "doubling":  # the whole tensor in each step
            return halvings + extra, (halvings + extra) * bytes
        return 2 * halvings + extra, (2 * (core - 1) / core + extra) * bytes
    if algorithm == "tree":
        return levels, levels * bytes
    return ranks - 1, (ranks - 1) / ranks * bytes  # ring and direct: one block per message


def bytes_sent(collective: str, bytes: float, ranks: int, algorithm: str | None = None) -> float:
    """Return the bytes sent by the rank that sends the most, if all blocks are equal.

    On a ring and in an all-to-all every rank sends the same number of bytes. In a broadcast and a
    scatter the root sends the most. In a reduce and a gather every rank but the root sends the
    same.
    """
    algorithm, ranks = checked_arguments(collective, bytes, ranks, algorithm)
    if collective == "reduce":
        return bytes if ranks > 1 else 0
    if collective == "gather":
        return bytes / ranks if ranks > 1 else 0
    if algorithm == "tree":  # the root of a broadcast sends to each of its children
        return (ranks - 1).bit_length() * bytes
    if collective == "all_reduce" and algorithm != "ring":  # and the sum to a rank beyond the core
        core = 2 ** (ranks.bit_length() - 1)
        own = core.bit_length() - 1 if algorithm == "doubling" else 2 * (core - 1) / core
        return (own + (ranks > core)) * bytes
    return _critical_path(collective, bytes, ranks, algorithm)[1]


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (alpha, beta) of the line alpha + size * beta that is nearest to the measured times.

    The fit minimizes the squares of the *relative* errors, because sizes span decades: with plain
    least squares the largest message alone would decide, and alpha would be its noise. If the times
    are not on a line (because a cache overflows, for example), alpha may be negative: look at the
    points.

    Args:
        sizes: The bytes of each measurement.
        seconds: The seconds of each measurement.

    Returns:
        alpha in seconds and beta in seconds per byte.

    Raises:
        ValueError: If there are fewer than two different sizes, if the lists have different
            lengths, if a size is negative, or if a time is not positive.
    """
    if len(sizes) != len(seconds):
        raise ValueError(f"{len(sizes)} sizes but {len(seconds)} times")
    if len(set(sizes)) < 2:
        raise ValueError("a line needs at least two different sizes")
    for size, time in zip(sizes, seconds, strict=True):
        checked_arguments(bytes=size)
        if not (isfinite(time) and time > 0):
            raise ValueError(f"every time must be positive, not {time!r}")
    # Minimize sum(((alpha + size * beta) / time - 1) ** 2): two unknowns, two normal equations.
    # Sizes in units of the largest keep the sums at similar magnitudes.
    unit = max(sizes)
    rows = [(1 / time, size / unit / time) for size, time in zip(sizes, seconds, strict=True)]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a1 = sum(a for a, _ in rows)
    b1 = sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    return (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant / unit


def checked_arguments(
    collective: str = "broadcast",
    bytes: float = 0,
    ranks: int = 1,
    algorithm: str | None = None,
) -> tuple[str, int]:
    """Return the algorithm to use, and the number of ranks (numpy's, too) as an int.

    Raises:
        ValueError: If an argument makes no sense.
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"collective must be one of {sorted(ALGORITHMS)}, not {collective!r}")
    if not (isfinite(bytes) and bytes >= 0):
        raise ValueError(f"bytes must be at least 0 and finite, not {bytes!r}")
    if not hasattr(ranks, "__index__") or index(ranks) < 1:
        raise ValueError(f"ranks must be a positive whole number, not {ranks!r}")
    ranks, known = index(ranks), ALGORITHMS[collective]
    if algorithm is not None and algorithm not in known:
        raise ValueError(f"algorithm of {collective} must be one of {known}, not {algorithm!r}")
    if not _runs(collective, ranks, algorithm):
        raise ValueError(f"{collective} by {algorithm} needs a power of two of ranks, not {ranks}")
    return algorithm or known[0], ranks
