"""Report what happened to a cell on one rank, as plain data that always reaches the notebook.

The report is possible whatever a cell raises, closes, replaces or exhausts: an exception that
cannot be converted to text, a closed stream, a rank that has run out of memory.
"""

from __future__ import annotations

import gc
import mmap
import traceback
from typing import Any

from naranhi.world import capture
from naranhi.world.collective_checks import CollectiveMismatch, CollectiveTimeout
from naranhi.world.errors import unknown

RESERVE = 16 << 20  # bytes set aside, to report a failure when no other memory is left
ROOM = 64 << 20  # bytes that a rank needs beyond that to continue: threads, buffers, sockets
_reserve = None


def set_aside() -> bool:
    """Set the reserve aside; return whether there is enough memory left to go on."""
    global _reserve
    try:
        _reserve = _reserve or _address_space(RESERVE)
        _address_space(ROOM).close()
    except OSError:
        return False
    return True


def _address_space(size):
    """Map memory that counts against a limit but is never touched, so it costs microseconds."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def outcome(
    displays: list[tuple[dict[str, Any], dict[str, Any]]],
    error: BaseException | None,
    value: bytes | None = None,
) -> dict[str, Any]:
    """Return the outcome of a cell as plain data.

    Args:
        displays: pairs of data and metadata, as IPython displays them.
        error: what was raised, or None.
        value: the pickled result, or None.

    Returns:
        A dict of: `stdout` and `stderr`, what was printed; `shown`, see `capture.shown`; `displays`
        and `value`, as passed; `error`, None or a description as `errors.unknown` makes it;
        `exhausted`, whether this rank has too little memory left to go on.
    """
    global _reserve
    if error is not None:
        if _reserve is not None:
            _reserve.close()
            _reserve = None
        try:
            error = _described(error)
        except BaseException:  # its class is too odd to describe
            error = unknown("Exception", "<an error that cannot be described>")
    stdout, stderr = capture.take()
    exhausted = not set_aside()
    if exhausted:  # only then, because with torch imported a collection takes half a second
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
        if isinstance(error, BaseExceptionGroup):
            inner = (f"{_text(type(one).__name__)}: {_message(one)}" for one in error.exceptions)
            return f"{_text(error.message)}: {'; '.join(inner)}"
        return _text(str(error))
    except BaseException as second:  # its own __str__ failed, even by SystemExit
        return f"<an error without words: its __str__ raised {_text(type(second).__name__)}>"


def _text(text):
    """Return a plain str: a subclass of str, or surrogates, may not survive the transfer."""
    return "".join(["", text]).encode(errors="backslashreplace").decode()
