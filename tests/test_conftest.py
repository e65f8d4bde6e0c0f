"""What holds for all tests."""

import fcntl
import time

import host_network
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=2)
@given(st.just(0.3))
def test_an_example_may_take_long(seconds):
    """Hypothesis allows 0.2 s by itself, which a busy machine needs now and then."""
    time.sleep(seconds)


def test_the_hosts_network_changes_only_while_no_page_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(host_network, "LOCK", tmp_path / "lock")
    with host_network.unchanged(), host_network.unchanged():
        assert not is_free(fcntl.LOCK_EX)
    with host_network.changing():
        assert not is_free(fcntl.LOCK_SH)
    assert is_free(fcntl.LOCK_EX)


def is_free(kind):
    with host_network.LOCK.open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
