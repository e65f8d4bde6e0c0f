"""Run ranks from a notebook: a `World` of processes that live as long as the notebook.

Built on ipyparallel. A cell that begins with `%%ranks` runs on every rank; `world.run` calls a
function on every rank. Output is shown in rank order, a failure is one `RankError`, and no process
outlives the notebook.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from naranhi.world import engine, interrupts, notebook, output
from naranhi.world.cell import Cell
from naranhi.world.errors import (
    RankError,
    RankInterrupt,
    diagnose,
    interruption,
    kind,
    named,
)
from naranhi.world.launch import Launched
from naranhi.world.places import numbered
from naranhi.world.values import pickled, received

LONGEST = 1e6  # seconds, the longest deadline: eleven days


class World:
    """Start `ranks` processes, each a rank of one process group.

    The ranks start on this machine, or by `srun` on the nodes of the Slurm allocation that the
    notebook runs in. In a `%%ranks` cell the names `rank`, `world_size`, `device`, `torch` and
    `dist` are defined.

    Args:
        ranks: the number of ranks, at least 1.
        backend: `"nccl"` or `"gloo"`; by default NCCL if there is a GPU for each rank, otherwise
            gloo.
        timeout: the deadline of every collective, in seconds.

    Raises:
        TypeError: an argument has the wrong type; raised before anything is started.
        ValueError: an argument is out of range; raised before anything is started. Also: NCCL is
            requested and there is not one GPU for each rank.
        RankError: the ranks did not start. Also: this process is itself a rank.
    """

    def __init__(self, ranks: int, *, backend: str | None = None, timeout: float = 20.0):
        if isinstance(ranks, bool) or not isinstance(ranks, int):
            raise TypeError(f"World needs a whole number of ranks, not {ranks!r}")
        if ranks < 1:
            raise ValueError(f"World needs at least one rank, not {ranks}")
        if not 0 < timeout <= LONGEST:
            raise ValueError(
                f"timeout must be a number of seconds above 0 and at most {LONGEST:g}, "
                f"not {timeout!r}"
            )
        if backend not in (None, "gloo", "nccl"):
            raise ValueError(f"backend {backend!r} does not exist here; choose 'gloo' or 'nccl'")
        if engine.is_rank():
            raise RankError(
                "this process is a rank of a World, and a rank starts no other World; "
                "start it in a cell without %%ranks"
            )
        self.size = ranks
        self.timeout = timeout
        self._wanted = backend
        self._ranks = None
        self._closed = False
        self._owner = os.getpid()
        self._in_use = threading.RLock()
        if notebook.current is not None:
            notebook.current.close()  # a notebook has one World; a cell run twice restarts it
        self._start()
        atexit.register(self.close)
        notebook.enter(self)

    def __repr__(self) -> str:
        if self._closed:
            return f"<World of {self.size}, closed>"
        return f"<World of {self.size}, {self.backend}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a World cannot be pickled, so a function for world.run cannot use it; "
            "pass what the function needs instead: world.run(function, world.size)"
        )

    # ---- running ---------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank.

        What the function prints is shown in rank order. The function and its arguments are sent by
        cloudpickle, so a function defined in the notebook works. Results are sent whole, pickled
        and encrypted: 1 GiB from one rank took 20 s on two busy cores, twice its size in the
        notebook's memory and three times in the rank's. Return small results; leave large ones on
        the ranks, or in a file.

        Args:
            function: the function to call.
            args: its positional arguments, the same on every rank.
            kwargs: its keyword arguments.

        Returns:
            The list of results, in rank order; their tensors are on the CPU.

        Raises:
            RankError: a rank failed, or the ranks are busy with a call from another thread.
        """
        outcomes = self._everywhere(engine.call, pickled((function, args, kwargs)))
        return [received(outcome.pop("value")) for outcome in outcomes]

    def execute(self, source: str) -> None:
        """Run a cell's source on every rank, in the namespace that the rank's cells share.

        Raises:
            RankError: a rank failed.
        """
        self._everywhere(engine.execute, source, cell=numbered(source))

    def __getitem__(self, name: str) -> list[Any]:
        """Return the variable `name` of every rank's namespace, as a list in rank order.

        Tensors are copies on the CPU.

        Raises:
            RankError: a rank has no variable of that name.
        """
        outcomes = self._everywhere(engine.get, name)
        return [received(outcome.pop("value")) for outcome in outcomes]

    def close(self) -> None:
        """End every process of this World; do nothing if it is closed, or in a forked child."""
        # A forked child has a copy of this object, but does not own the processes.
        if not self._closed and os.getpid() == self._owner:
            self._closed = True
            self._end()
            atexit.unregister(self.close)
            notebook.leave(self)

    # ---- starting and recovering -------------------------------------------------------------

    def _start(self):
        try:
            with interrupts.deferred() as check:
                self._ranks = Launched(self.size, self._wanted, check)
                self.backend: str = self._ranks.backend
                self._epoch = 0
                self._join()
        except BaseException:  # also Ctrl-C, which the block raises at its end
            self._end()
            raise
        self._dead, self._broken, self._lost = False, None, set()

    def _end(self):
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            with interrupts.deferred():  # what is left could not be ended later
                ranks.close()

    def _join(self):
        """Form a process group; return the names of variables that held old groups, by rank."""
        self._epoch += 1
        self._ranks.keys.clear()
        common = self._epoch, self.backend, self.timeout
        arguments = [
            (rank, self.size, m.gpu if self.backend == "nccl" else m.local_rank, m.threads, *common)
            for rank, m in enumerate(self._ranks.members)
        ]
        return self._ranks.call(engine.join, arguments)

    def _ready(self):
        if self._closed:
            raise RankError("this World is closed; start another: world = naranhi.World(4)")
        if not self._dead:
            gone = self._ranks.gone()
            if gone:
                self._dead = True
                print(f"{gone} died since the last cell")
        if self._dead:
            self._restart()
        elif self._broken is not None:
            self._rebuild()

    def _rebuild(self):
        try:
            with interrupts.deferred():  # which may raise at its end
                self._lost |= set(itertools.chain(*self._join()))
        except Exception as failure:  # the group is beyond repair: say so, restart the ranks
            print(f"the process group could not be rebuilt ({type(failure).__name__})")
            self._restart()
            return
        again = f"; create again: {', '.join(sorted(self._lost))}" if self._lost else ""
        if again or self._broken:
            print(f"the process group was rebuilt{self._broken}{again}")
        self._broken, self._lost = None, set()

    def _restart(self):
        self._dead = True
        self._end()
        self._start()
        print(f"{named(range(self.size))} restarted; the variables of earlier cells are lost")

    # ---- one cell ------------------------------------------------------------------------------

    def _everywhere(self, function, *args, cell=None):
        if not self._in_use.acquire(blocking=False):
            raise RankError(
                "the ranks are busy with a call from another thread; wait until it has returned"
            )
        try:
            return self._call(function, args, cell)
        finally:
            self._in_use.release()

    def _call(self, function, args, cell):
        self._ready()
        self._dead = True  # until all have answered: an earlier interruption leaves ranks busy
        ranks = self._ranks  # another thread's `close` may set it to None
        run = Cell(ranks, self.timeout)
        run.run(function, args)
        outcomes = run.outcomes
        errors = [outcome["error"] for outcome in outcomes.values() if outcome["error"]]
        exhausted = [rank for rank, outcome in outcomes.items() if outcome.get("exhausted")]
        fine = not (errors or run.died or run.pending or run.interrupted)
        self._dead = bool(run.died or run.pending or exhausted)
        if any(outcome.get("left_group") for outcome in outcomes.values()):
            self._broken = ", because a cell had left it (destroy_process_group)"
        # An error that all ranks raise alike, before any message was late, leaves no rank ahead of
        # another, and the process group intact.
        alike = len(errors) == self.size and len({_what(e) for e in errors}) == 1
        alike = alike and kind(errors[0]) == "cause"
        if self._broken is None and not fine and (run.severed or not alike):
            self._broken = ""
        output.show(run.printed())
        _say_put_back(outcomes)
        if fine:
            return [outcomes[rank] for rank in range(self.size)]
        if run.controller_died:
            raise RankError(ranks.how_controller_ended()) from None
        if run.interrupted:
            raise RankInterrupt(interruption(outcomes, run.died, run.stuck, cell)) from None
        raise diagnose(outcomes, run.died, run.stuck, self.timeout, cell) from None


def _what(error):
    lines = tuple((line, function) for _, line, function, _ in error["frames"])
    return error["type"], error["message"], error["syntax"], lines


def _say_put_back(outcomes):
    names = {name for outcome in outcomes.values() for name in outcome.get("put_back", ())}
    if names:
        print(f"restored, because every cell relies on them: {', '.join(sorted(names))}")
