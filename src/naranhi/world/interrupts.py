"""Defer Ctrl-C while something must not be cut off halfway: an import, the start of processes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Record Ctrl-C inside the block, and raise KeyboardInterrupt at its end, however it ends.

    Yields:
        A function that raises KeyboardInterrupt at once if Ctrl-C was pressed. Call it where the
        block waits.
    """
    if threading.current_thread() is not threading.main_thread():  # no signal arrives here
        yield lambda: None
        return
    pressed = []

    def check():
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield check
    except BaseException as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    check()
