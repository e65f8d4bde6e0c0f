"""What attention over a cut sequence costs: by hand, against each other, and what is refused."""

import pytest

from naranhi import costs

SHAPE = {"sequence": 1000, "head_size": 10, "element": 4}


def sent(way, ranks, heads, kv_heads, **options):
    return costs.context_bytes_sent(
        way, ranks, **{**SHAPE, **options}, heads=heads, kv_heads=kv_heads
    )


def test_bytes_by_hand():
    """4 ranks, 8 heads: 250 tokens of 10 values of 4 bytes are 10 kB for a head."""
    assert sent("ring", 4, 8, 2) == 3 * (2 * 2 * 10_000) * 3  # blocks, keys and values, thrice
    assert sent("gathered", 4, 8, 2) == 3 * (2 * 2 * 10_000) * 2
    assert sent("ulysses", 4, 8, 4) == 2 * (8 + 4 + 4 + 8) * 10_000 * 3 / 4
    assert sent("ring", 4, 8, 2, backward=False) == 3 * (2 * 2 * 10_000)
    assert sent("ulysses", 4, 8, 4, backward=False) == (8 + 4 + 4 + 8) * 10_000 * 3 / 4
    # Gradients that are summed travel in 4 bytes, the rest in 2.
    assert sent("ring", 4, 8, 2, element=2) == 3 * (2 * 2 * 5_000) * (2 + 2)
    assert sent("gathered", 4, 8, 2, element=2) == 3 * (2 * 2 * 5_000) * (1 + 2)
    for way in costs.CONTEXT_WAYS:
        assert sent(way, 1, 8, 4) == 0
        assert sent(way, 4, 8, 4, batch=3) == 3 * sent(way, 4, 8, 4)


def test_where_the_ways_cross():
    """Ulysses beats gathering from 1 + h/k ranks on, and a ring from two thirds of it on."""
    for heads, kv_heads in ((32, 32), (32, 16), (64, 16)):
        crossing = 1 + heads / kv_heads
        for ranks in (2, 4, 8, 16):
            ulysses = sent("ulysses", ranks, heads, kv_heads)
            gathered, ring = (sent(way, ranks, heads, kv_heads) for way in ("gathered", "ring"))
            assert (ulysses < gathered) == (ranks > crossing)
            assert (ulysses < ring) == (ranks > crossing * 2 / 3)
    assert sent("ulysses", 2, 8, 8) == sent("gathered", 2, 8, 8)


def test_messages():
    assert [costs.context_messages(way, 4) for way in costs.CONTEXT_WAYS] == [9, 6, 12]
    forward = [costs.context_messages(way, 4, backward=False) for way in costs.CONTEXT_WAYS]
    assert forward == [3, 3, 6]
    assert costs.context_messages("ring", 1) == 0


def test_bytes_saved_by_hand():
    def saved(way, ranks, element=4):
        shape = {**SHAPE, "element": element}
        return costs.context_bytes_saved(way, ranks, **shape, heads=8, kv_heads=4)

    assert saved("ring", 1) == 1000 * ((8 + 4 + 4 + 8) * 10 + 8) * 4
    assert saved("ring", 4) == saved("ulysses", 4) == saved("ring", 1) / 4
    assert saved("gathered", 4) == saved("ring", 4) + 750 * (4 + 4) * 10 * 4
    assert saved("ring", 1, 2) == 1000 * ((8 + 4 + 4 + 8) * 10 * 2 + 8 * 4)


def test_the_idle_share():
    assert [costs.context_idle(ranks) for ranks in (1, 2, 4)] == [0, 1 / 3, 3 / 7]
    assert costs.context_idle(8, "head_tail") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("star", 4, 8, 4), "way must be one of"),
        (("ring", 0, 8, 4), "ranks must be a positive whole number"),
        (("ring", 4, 8, 3), "3 key-value heads do not divide 8 heads"),
        (("ulysses", 8, 8, 4), "8 ranks do not divide 4 key-value heads"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sent(*arguments)
    way, ranks, heads, kv_heads = arguments
    with pytest.raises(ValueError, match=message):
        costs.context_bytes_saved(way, ranks, **SHAPE, heads=heads, kv_heads=kv_heads)


def test_unknown_orders_and_ways_are_refused():
    with pytest.raises(ValueError, match="order must be"):
        costs.context_idle(4, "zigzag")
    with pytest.raises(ValueError, match="way must be"):
        costs.context_messages("star", 4)
