"""Support `await` in a cell of a rank: cells have an event loop separate from the engine's.

The engine calls a cell from inside its own event loop, where no second loop may run. While a cell
runs, the engine's loop is hidden. Tasks that a cell started continue when a later cell awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

_loop = None


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hide the running event loop inside the block."""
    engine = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.events._set_running_loop(engine)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a cell's coroutine to its end and return its result; IPython's `loop_runner`."""
    global _loop
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    task = _loop.create_task(coroutine)
    try:
        return _loop.run_until_complete(task)
    except BaseException:
        if not task.done() and not _loop.is_closed():  # interrupted: no later cell may resume it
            task.cancel()
            _loop.run_until_complete(asyncio.wait([task]))
        raise
