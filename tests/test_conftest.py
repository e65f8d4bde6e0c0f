"""What holds for all tests."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=2)
@given(st.just(0.3))
def test_an_example_may_take_long(seconds):
    """Hypothesis allows 0.2 s by itself, which a busy machine needs now and then."""
    time.sleep(seconds)
