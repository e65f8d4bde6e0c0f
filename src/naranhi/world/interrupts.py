"""Ctrl-C while something must not be cut off in the middle: an import, the start of processes."""

import contextlib
import signal
import threading


@contextlib.contextmanager
def deferred():
    """Note Ctrl-C inside the block, and raise KeyboardInterrupt at its end.

    Yields:
        A function that raises KeyboardInterrupt at once if Ctrl-C was pressed: for the places of
        the block that wait.
    """
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield lambda: None
        return
    pressed = []

    def check():
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
    check()
