"""``await`` in a cell of a rank: an event loop of the cells' own, beside the engine's.

The engine calls a cell from inside its own event loop, where no second one may run. While a cell
runs, the engine's is hidden. What a cell has started in the loop goes on when a later cell awaits.
"""

import asyncio
import contextlib

_loop = None


@contextlib.contextmanager
def hidden():
    """Hide the running event loop inside the block."""
    engine = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.events._set_running_loop(engine)


def run(coroutine):
    """Run a cell's coroutine to its end; IPython's ``loop_runner``."""
    global _loop
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    task = _loop.create_task(coroutine)
    try:
        return _loop.run_until_complete(task)
    except BaseException:
        if not task.done() and not _loop.is_closed():  # interrupted: no later cell is to go on here
            task.cancel()
            _loop.run_until_complete(asyncio.wait([task]))
        raise
