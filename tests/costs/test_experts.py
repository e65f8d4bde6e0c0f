"""What a mixture of experts costs, by hand; the bytes counted on ranks are in expert_parallel."""

import pytest

from naranhi import costs

EVEN = [[2, 2], [2, 2]]
SKEWED = [[1, 3], [0, 4]]  # rank 1 computes 7 of 8 rows


def test_bytes_by_hand():
    # 10 tokens of 3 elements with 2 experts each: 20 rows of 12 bytes, of which 1/4 stays.
    assert costs.moe_bytes_sent(10, 3, 2, 4) == 4 * 20 * 12 * 3 / 4
    assert costs.moe_bytes_sent(10, 3, 2, 4, backward=False) == 2 * 20 * 12 * 3 / 4
    assert costs.moe_bytes_sent(10, 3, 2, 4, element_bytes=2) == 4 * 20 * 6 * 3 / 4
    assert costs.moe_bytes_sent(10, 3, 2, 1) == 0
    # 8 experts: 8 counts of first choices, 8 of second ones, 8 probabilities, a sign.
    assert costs.moe_count_bytes_sent(8, 2, 4) == 8 * 25 * 3


def test_rows_by_hand():
    assert costs.moe_rows_sent(EVEN, 0) == costs.moe_rows_sent(EVEN, 1) == 8
    # Rank 0 sends 3 rows and no result back; rank 1 sends no row and 3 results.
    assert costs.moe_rows_sent(SKEWED, 0, backward=False) == 3
    assert costs.moe_rows_sent(SKEWED, 1, backward=False) == 3
    assert costs.moe_rows_sent([[5]], 0) == 0


def test_rows_of_an_even_routing_are_the_formulas():
    rows = [[6] * 4] * 4  # 12 tokens, top 2, 4 ranks
    assert costs.moe_rows_sent(rows, 3) * 5 * 4 == costs.moe_bytes_sent(12, 5, 2, 4)


@pytest.mark.parametrize("backward", [True, False])
def test_at_the_break_even_both_ways_send_as_much(backward):
    tokens = costs.break_even_tokens(64, 8, 2, backward=backward)
    for ranks, hidden in ((2, 16), (4, 48)):
        moved = costs.moe_bytes_sent(tokens, hidden, 2, ranks, backward=backward)
        gathered = costs.gathered_experts_bytes_sent(hidden, 64, 8, ranks, backward=backward)
        assert moved == pytest.approx(gathered)
    assert tokens == (1.5 if backward else 1.0) * 8 * 64 / 2


def test_the_busiest_rank_decides():
    assert costs.imbalance(EVEN) == 1.0 and costs.imbalance(SKEWED) == 7 / 4
    assert costs.imbalance([[0, 3], [0, 5]]) == 2.0
    with pytest.raises(ValueError, match="no rank has a row"):
        costs.imbalance([[0, 0], [0, 0]])
    speeds = {"flops": 100.0, "alpha": 1000.0, "beta": 1.0}
    # Four all-to-alls of a message of 2 rows of 3 elements; 4 rows of 12 x 3 x 5 operations.
    assert costs.moe_seconds(EVEN, 3, 5, **speeds) == 4 * (1000 + 2 * 12) + 4 * 180 / 100
    assert costs.moe_seconds(SKEWED, 3, 5, **speeds) == 4 * (1000 + 3 * 12) + 7 * 180 / 100
