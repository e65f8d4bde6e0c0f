"""The formulas of communication: by hand, against a simulation, and their inverse."""

import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naranhi import costs

collectives = st.sampled_from(
    [(name, algorithm) for name, known in costs.ALGORITHMS.items() for algorithm in known]
)
sizes = st.integers(0, 10**12)
ranks = st.integers(1, 1000)


def test_bandwidths_by_hand():
    """1 GB in 1 s on 4 ranks, as nccl-tests would print it."""
    assert costs.algorithm_bandwidth(10**9, 0.5) == 2e9
    expected = {
        "all_reduce": 1.5e9,
        "reduce_scatter": 0.75e9,
        "all_gather": 0.75e9,
        "all_to_all": 0.75e9,
        "scatter": 0.75e9,
        "gather": 0.75e9,
        "broadcast": 1e9,
        "reduce": 1e9,
    }
    assert set(expected) == set(costs.ALGORITHMS)
    for collective, bandwidth in expected.items():
        assert costs.bus_bandwidth(collective, 10**9, 1.0, 4) == pytest.approx(bandwidth)


def test_seconds_by_hand():
    """alpha = 1000 and beta = 1: 8 bytes on 4 ranks, counted on paper."""

    def seconds(collective, ranks=4, algorithm=None):
        return costs.collective_seconds(collective, 8, ranks, 1000.0, 1.0, algorithm)

    assert seconds("broadcast") == seconds("reduce") == 2 * (1000 + 8)
    assert seconds("scatter") == seconds("gather") == seconds("all_to_all") == 3 * (1000 + 2)
    assert seconds("all_gather") == seconds("reduce_scatter") == 3 * (1000 + 2)
    assert seconds("all_reduce") == seconds("all_reduce", algorithm="ring") == 6 * (1000 + 2)
    assert seconds("all_reduce", algorithm="tree") == 4 * (1000 + 8)
    # 4 and 2 bytes by halving, 2 and 4 by doubling.
    assert seconds("all_reduce", algorithm="halving_doubling") == 4 * 1000 + 12
    # Three ranks: one hands its 8 bytes in and is given 8, the other two exchange 4 and 4.
    assert seconds("all_reduce", 3, "halving_doubling") == 4 * 1000 + 8 + 4 + 4 + 8
    # The whole in each of two steps; three ranks: one in, one exchange, one out.
    assert seconds("all_reduce", algorithm="doubling") == 2 * (1000 + 8)
    assert seconds("all_reduce", 3, "doubling") == 3 * (1000 + 8)
    # The ring's blocks in two messages instead of three.
    assert seconds("all_gather", algorithm="doubling") == 2 * 1000 + 6
    assert seconds("reduce_scatter", algorithm="halving") == 2 * 1000 + 6
    assert seconds("broadcast", 5) == 3 * (1000 + 8)


def test_the_fastest_algorithm_turns_where_the_lines_cross():
    def fastest(collective, size, ranks, **options):
        return costs.fastest(collective, size, ranks, 1000.0, 1.0, **options)

    # Four ranks: doubling takes 2 alpha + 2 S, halving and doubling 4 alpha + 3/2 S.
    kernels = ("ring", "halving_doubling", "doubling")
    assert fastest("all_reduce", 3999, 4, among=kernels) == "doubling"
    assert fastest("all_reduce", 4001, 4, among=kernels) == "halving_doubling"
    # Three: 3 alpha + 3 S, 4 alpha + 3 S, and the ring's 4 alpha + 4/3 S.
    assert fastest("all_reduce", 599, 3, among=kernels) == "doubling"
    assert fastest("all_reduce", 601, 3, among=kernels) == "ring"
    assert fastest("all_reduce", 8, 2) == "doubling"  # a tree takes as long, and comes after it
    assert fastest("all_gather", 8, 4) == "doubling" and fastest("all_gather", 8, 3) == "ring"
    with pytest.raises(ValueError, match="none of doubling runs all_gather on 3 ranks"):
        fastest("all_gather", 8, 3, among=("doubling",))
    assert fastest("reduce_scatter", 8, 8) == "halving" and fastest("broadcast", 8, 8) == "tree"
    with pytest.raises(ValueError, match="needs a power of two of ranks, not 6"):
        costs.bytes_sent("all_gather", 8, 6, "doubling")


def links_of_a_tree(ranks):
    """For each rank of a binomial broadcast, to how many it sends: grown by doubling."""
    sends, have = [0] * ranks, 1
    while have < ranks:
        new = min(have, ranks - have)
        for rank in range(new):
            sends[rank] += 1
        have += new
    return sends


@given(ranks=st.integers(1, 300))
def test_the_trees_root_sends_the_most(ranks):
    assert costs.bytes_sent("broadcast", 1, ranks) == max(links_of_a_tree(ranks))


@given(collectives, sizes, ranks, st.floats(0, 1), st.floats(0, 1e-6))
def test_the_model_is_linear_and_never_below_what_must_move(which, size, ranks, alpha, beta):
    collective, algorithm = which
    if which in costs.POWER_OF_TWO_ONLY:
        ranks = 2 ** (ranks.bit_length() - 1)
    seconds = costs.collective_seconds(collective, size, ranks, alpha, beta, algorithm)
    messages = costs.collective_seconds(collective, size, ranks, 1.0, 0.0, algorithm)
    volume = costs.collective_seconds(collective, size, ranks, 0.0, 1.0, algorithm)
    assert seconds == pytest.approx(messages * alpha + volume * beta)
    assert volume * (1 + 1e-12) >= costs.bytes_sent(collective, size, ranks, algorithm)
    if ranks == 1:
        assert seconds == 0
    else:
        # The bus bandwidth counts what must cross a link at least, so it cannot exceed the link's.
        bandwidth = costs.bus_bandwidth(collective, size, volume, ranks) if volume else 0
        assert bandwidth <= 1 + 1e-12


@given(sizes, ranks)
def test_all_reduce_is_reduce_scatter_then_all_gather(size, ranks):
    for cost in (
        costs.bytes_sent,
        lambda *args: costs.collective_seconds(*args, alpha=3e-5, beta=2e-9),
    ):
        halves = cost("reduce_scatter", size, ranks) + cost("all_gather", size, ranks)
        assert cost("all_reduce", size, ranks) == pytest.approx(halves)


@given(st.integers(2, 64))
def test_a_ring_wins_for_long_tensors_and_a_tree_for_short_ones(ranks):
    def seconds(size, algorithm):
        return costs.collective_seconds("all_reduce", size, ranks, 1e-5, 1e-9, algorithm)

    assert seconds(10**9, "ring") <= seconds(10**9, "tree")
    assert seconds(4, "tree") <= seconds(4, "ring") * (1 + 1e-3)


@given(
    alpha=st.floats(1e-7, 1e-2),
    beta=st.floats(1e-12, 1e-7),
    exponents=st.lists(st.integers(0, 28), min_size=2, max_size=12, unique=True),
)
def test_the_fit_finds_the_line_it_was_given(alpha, beta, exponents):
    points = [2**exponent for exponent in exponents]
    seconds = [alpha + size * beta for size in points]
    found_alpha, found_beta = costs.fit_alpha_beta(points, seconds)
    for size in points:
        assert found_alpha + size * found_beta == pytest.approx(alpha + size * beta, rel=1e-6)


def test_zero_by_hand():
    """The paper's example: 7.5 billion parameters on 64 ranks, mixed precision and Adam, in GB."""

    def gigabytes(stage):
        return costs.zero_bytes(7.5e9, 64, stage) / 1e9

    assert [gigabytes(stage) for stage in range(4)] == pytest.approx(
        [120, 31.4, 16.6, 1.88], abs=0.05
    )  # rounded, as printed there
    for (precision, optimizer), (values, state) in {
        ("bf16", "adam"): ((2, 2), 12),
        ("bf16", "momentum"): ((2, 2), 8),
        ("bf16", "sgd"): ((2, 2), 4),
        ("fp32", "adam"): ((4, 4), 8),
        ("fp32", "momentum"): ((4, 4), 4),
        ("fp32", "sgd"): ((4, 4), 0),
    }.items():
        weights, gradients = values
        found = [costs.zero_bytes(100, 4, stage, precision, optimizer) for stage in range(4)]
        assert found == [
            100 * (weights + gradients + state),
            100 * (weights + gradients + state / 4),
            100 * (weights + (gradients + state) / 4),
            100 * (weights + gradients + state) / 4,
        ]
    # On 4 ranks, 3/4 of 100 values leave a rank in each collective of the two, or three.
    assert [costs.zero_bytes_sent(100, 4, stage, "fp32") for stage in range(4)] == [
        600,
        600,
        600,
        900,
    ]
    assert [costs.zero_bytes_sent(100, 4, stage) for stage in range(4)] == [300, 300, 300, 450]


@given(
    st.integers(0, 10**12),
    ranks,
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from(["adam", "momentum", "sgd"]),
)
def test_zero_holds_less_with_each_stage(parameters, ranks, precision, optimizer):
    held = [costs.zero_bytes(parameters, ranks, stage, precision, optimizer) for stage in range(4)]
    assert all(more >= less for more, less in pairwise(held))
    assert held[3] * ranks == pytest.approx(held[0])  # the ranks hold it once, together
    sent = [costs.zero_bytes_sent(parameters, ranks, stage, precision) for stage in range(4)]
    size = parameters * (2 if precision == "bf16" else 4)
    assert sent[:3] == [pytest.approx(costs.bytes_sent("all_reduce", size, ranks))] * 3
    assert sent[3] == pytest.approx(1.5 * sent[0])


def test_the_fit_weighs_relative_errors():
    """2% too slow at 1 GB moves the latency of small messages by nothing to speak of."""
    points = [8, 1024, 2**20, 2**30]
    seconds = [1e-5 + size * 1e-9 for size in points]
    seconds[-1] *= 1.02
    alpha, beta = costs.fit_alpha_beta(points, seconds)
    assert alpha == pytest.approx(1e-5, rel=0.01)
    assert beta == pytest.approx(1e-9, rel=0.02)


def test_the_fit_is_least_squares():
    """No other line nearby has a smaller sum of squared relative errors."""
    points, seconds = [1, 1000, 5000, 20000], [1.1, 2.3, 5.2, 24.0]

    def error(alpha, beta):
        pairs = zip(points, seconds, strict=True)
        return sum(((alpha + size * beta) / time - 1) ** 2 for size, time in pairs)

    alpha, beta = costs.fit_alpha_beta(points, seconds)
    best = error(alpha, beta)
    for da, db in [(1e-3, 0), (-1e-3, 0), (0, 1e-6), (0, -1e-6), (1e-3, -1e-6)]:
        assert error(alpha + da, beta + db) > best


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: costs.algorithm_bandwidth(-1, 1.0), "bytes must be at least 0 and finite, not -1"),
        (lambda: costs.algorithm_bandwidth(1, 0.0), "seconds must be positive, not 0.0"),
        (lambda: costs.algorithm_bandwidth(1, float("nan")), "seconds must be positive, not nan"),
        (lambda: costs.bus_bandwidth("allreduce", 1, 1.0, 2), "'scatter'], not 'allreduce'"),
        (
            lambda: costs.bus_bandwidth("all_reduce", 1, 1.0, 0),
            "ranks must be a positive whole number, not 0",
        ),
        (
            lambda: costs.collective_seconds("all_reduce", 1, 2, 0, 0, "star"),
            "algorithm of all_reduce must be one of ",
        ),
        (
            lambda: costs.collective_seconds("broadcast", 1, 2, 0, 0, "ring"),
            "algorithm of broadcast must be one of ('tree',), not 'ring'",
        ),
        (
            lambda: costs.bytes_sent("all_reduce", float("inf"), 2),
            "bytes must be at least 0 and finite, not inf",
        ),
        (
            lambda: costs.bytes_sent("all_reduce", 1, 2.0),
            "ranks must be a positive whole number, not 2.0",
        ),
        (lambda: costs.zero_bytes(-1, 2, 1), "parameters must be at least 0 and finite, not -1"),
        (
            lambda: costs.zero_bytes(float("inf"), 2, 1),
            "parameters must be at least 0 and finite, not inf",
        ),
        (lambda: costs.zero_bytes(1, 0, 1), "ranks must be a positive whole number, not 0"),
        (lambda: costs.zero_bytes(1, 2, 4), "stage must be 0, 1, 2 or 3, not 4"),
        (
            lambda: costs.zero_bytes(1, 2, 1, "mixed"),
            "precision must be one of ['bf16', 'fp32'], not 'mixed'",
        ),
        (
            lambda: costs.zero_bytes(1, 2, 1, "fp32", "lion"),
            "optimizer must be one of ['adam', 'momentum', 'sgd'], not 'lion'",
        ),
        (lambda: costs.zero_bytes_sent(1, 2, -1), "stage must be 0, 1, 2 or 3, not -1"),
        (
            lambda: costs.zero_bytes_sent(1, 2, 1, "half"),
            "precision must be one of ['bf16', 'fp32'], not 'half'",
        ),
        (lambda: costs.fit_alpha_beta([1, 2], [1.0]), "2 sizes but 1 times"),
        (
            lambda: costs.fit_alpha_beta([1, 1], [1.0, 1.1]),
            "a line needs at least two different sizes",
        ),
        (lambda: costs.fit_alpha_beta([1, 2], [1.0, 0.0]), "every time must be positive, not 0.0"),
        (
            lambda: costs.fit_alpha_beta([1, 2], [1.0, float("nan")]),
            "every time must be positive, not nan",
        ),
        (lambda: costs.fit_alpha_beta([], []), "a line needs at least two different sizes"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


@pytest.mark.parametrize("ranks", [np.int64(100), np.int8(100)])
def test_ranks_may_be_of_numpy(ranks):
    """Also in 8 bits, in which 2 x 99 is -58."""
    for algorithm in costs.ALGORITHMS["all_reduce"]:
        sent = costs.bytes_sent("all_reduce", 10**6, ranks, algorithm)
        assert sent == costs.bytes_sent("all_reduce", 10**6, 100, algorithm)
    times = [costs.collective_seconds("all_reduce", 10**6, n, 1e-5, 1e-9) for n in (ranks, 100)]
    bandwidths = [costs.bus_bandwidth("all_reduce", 10**6, 1.0, n) for n in (ranks, 100)]
    assert times[0] == times[1] and bandwidths[0] == bandwidths[1]
    assert costs.zero_bytes(10**6, ranks, 3) == costs.zero_bytes(10**6, 100, 3)


def test_costs_need_no_torch():
    code = "import sys, naranhi.costs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
