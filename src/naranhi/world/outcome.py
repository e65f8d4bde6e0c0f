"""What came of a cell on one rank, as plain data that always reaches the notebook.

Whatever a cell raises, closes, replaces or exhausts, its outcome can be told: an exception that
cannot be turned into text, a stream that is closed, a rank whose memory has run out.
"""

import gc
import mmap
import traceback

from naranhi.world import capture
from naranhi.world.collective_checks import CollectiveMismatch, CollectiveTimeout
from naranhi.world.errors import unknown

RESERVE = 16 << 20  # bytes set aside, with which a failure can be told when no others are left
ROOM = 64 << 20  # bytes beyond these without which a rank cannot go on: threads, buffers, sockets
_reserve = None


def set_aside():
    """Set the reserve aside; returns whether there is memory left to go on with."""
    global _reserve
    try:
        _reserve = _reserve or _address_space(RESERVE)
        _address_space(ROOM).close()
    except OSError:
        return False
    return True


def _address_space(size):
    """Memory that counts against a limit and is never touched, so it costs microseconds."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def outcome(displays, error, value=None):
    """Plain data: what was printed and displayed, the error or None, the pickled value or None.

    ``exhausted`` says that this rank has no memory left to go on with.

    Args:
        displays: pairs of data and metadata, as IPython displays them.
        error: what was raised, or None.
        value: the result, pickled.
    """
    global _reserve
    if error is not None:
        if _reserve is not None:
            _reserve.close()
            _reserve = None
        try:
            error = _described(error)
        except BaseException:  # its class is as odd as that
            error = unknown("Exception", "<an error that cannot be described>")
    stdout, stderr = capture.take()
    exhausted = not set_aside()
    if exhausted:  # only then: where torch is imported, a collection takes half a second
        gc.collect()
        exhausted = not set_aside()
    return {
        "stdout": stdout,
        "stderr": stderr,
        "shown": capture.shown(),
        "displays": displays,
        "error": error,
        "value": value,
        "exhausted": exhausted,
    }


def _described(error):
    described = unknown(_text(type(error).__name__), _message(error))
    frames = traceback.extract_tb(error.__traceback__)
    described["frames"] = [(f.filename, f.lineno, f.name, f.line or "") for f in frames]
    if isinstance(error, SyntaxError) and isinstance(error.lineno, int):
        described["syntax"] = error.lineno
    if isinstance(error, CollectiveMismatch):
        described["calls"] = error.calls
    if isinstance(error, CollectiveTimeout):
        described["absent"] = error.absent
    return described


def _message(error):
    try:
        return _text(str(error))
    except BaseException as second:  # its own __str__ failed, be it by SystemExit
        return f"<an error without words: its __str__ raised {_text(type(second).__name__)}>"


def _text(text):
    """A plain str of these characters: not of a class, nor with surrogates, that cannot travel."""
    return "".join(["", text]).encode(errors="backslashreplace").decode()
