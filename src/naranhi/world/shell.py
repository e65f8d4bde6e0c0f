"""A rank's IPython shell: errors, exit and input are the notebook's."""

from __future__ import annotations

import builtins
import sys
from typing import Any, NoReturn

from naranhi.world import event_loop

_shown: list[BaseException] = []  # what the running cell would have shown as a traceback


def shell() -> Any:
    """Return this process's shell."""
    from IPython import get_ipython

    return get_ipython()


def prepare() -> None:
    """Hand errors, `exit` and `input` over to the notebook."""
    own = shell()
    own.showtraceback = own.showsyntaxerror = _leave_it_to_the_notebook
    own.ask_exit = _not_by_a_cell
    own.loop_runner = event_loop.run
    builtins.input = _no_keyboard


def _leave_it_to_the_notebook(error=None, *args, **kwargs):
    """Replace the shell's own printing of errors: keep what it would print.

    Of an error in a magic (`%%capture`, `%run`) or in a `__repr__`, the result of a cell has none.
    """
    one = error[1] if isinstance(error, tuple) else sys.exc_info()[1]
    if one is not None:
        _shown.append(one)


def raise_shown() -> None:
    """Raise what the shell would have shown, if anything.

    Raises:
        BaseException: the first error: another may be its consequence.
    """
    if _shown:
        raise _shown[0]


def forget_shown() -> None:
    """Let go of these errors, and of what their frames hold: they are not the next cell's."""
    _shown.clear()


def _not_by_a_cell() -> NoReturn:
    raise RuntimeError(
        "exit and quit would end this rank; to end all ranks, call world.close() in a cell without "
        "%%ranks"
    )


def _no_keyboard(prompt: object = "") -> NoReturn:
    raise EOFError(
        "a rank has no keyboard to read from; call input() in a cell without %%ranks and pass "
        "the answer on: world.run(function, answer)"
    )
