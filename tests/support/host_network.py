"""Tests that change this host's network, and tests that look at pages, take turns.

When an address of the host comes or goes, Chromium drops what it is loading, also from loopback
(ERR_NETWORK_CHANGED).
"""

import fcntl
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(tempfile.gettempdir()) / f"naranhi-host-network-{os.getuid()}.lock"


def unchanged():
    """While this holds, no test changes the host's addresses."""
    return _held(fcntl.LOCK_SH)


def changing():
    """While this holds, no test looks at a page."""
    return _held(fcntl.LOCK_EX)


@contextmanager
def _held(kind):
    with LOCK.open("a") as file:
        fcntl.flock(file, kind)
        yield
