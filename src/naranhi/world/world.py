"""Ranks in a notebook: a World of processes that live as long as the notebook.

Built on ipyparallel. A cell that begins with ``%%ranks`` runs on every rank; ``world.run`` calls a
function on every rank. Output comes in rank order, a failure is one ``RankError``, and nothing
outlives the notebook.
"""

import atexit
import itertools

from naranhi.world import engine, interrupts, notebook, output
from naranhi.world.cell import Cell
from naranhi.world.errors import (
    RankError,
    RankInterrupt,
    diagnose,
    interruption,
    kind,
    named,
    numbered,
)
from naranhi.world.launch import Launched

LONGEST = 1e6  # seconds, the longest deadline: eleven days


class World:
    """``ranks`` processes, each a rank of one process group.

    Ranks start on this machine, or by ``srun`` on the nodes of the Slurm allocation that the
    notebook runs in. A cell ``%%ranks`` finds ``rank``, ``world_size``, ``device``, ``torch`` and
    ``dist`` at hand.

    Args:
        ranks: how many, at least 1.
        backend: ``"nccl"`` or ``"gloo"``; by default NCCL where each rank can have a GPU of its
            own, else gloo.
        timeout: the deadline of every collective, in seconds.

    Raises:
        TypeError, ValueError: an argument that makes no sense, before anything is started.
        RankError: the ranks did not come up.
    """

    def __init__(self, ranks, *, backend=None, timeout=20.0):
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
        self.size = ranks
        self.timeout = timeout
        self._wanted = backend
        self._ranks = None
        self._closed = False
        if notebook.current is not None:
            notebook.current.close()  # a notebook has one World; a cell run twice starts it anew
        self._start()
        atexit.register(self.close)
        notebook.enter(self)

    def __repr__(self):
        if self._closed:
            return f"<World of {self.size}, closed>"
        return f"<World of {self.size}, {self.backend}>"

    # ---- running ---------------------------------------------------------------------------

    def run(self, function, *args, **kwargs):
        """Call ``function(*args, **kwargs)`` on every rank.

        What it prints is shown in rank order. The function and its arguments travel by
        cloudpickle, so a function defined in the notebook will do. Results travel whole, pickled
        and encrypted: 1 GiB from one rank took 20 s on two busy cores, twice its size in the
        notebook's memory and three times in the rank's. Return what is small; leave what is large
        on the ranks, or in a file.

        Returns:
            The list of results, in rank order.

        Raises:
            RankError: on failure of any rank.
        """
        import cloudpickle

        pickled = cloudpickle.dumps((function, args, kwargs))
        outcomes = self._everywhere(engine.call, pickled)
        return [cloudpickle.loads(outcome.pop("value")) for outcome in outcomes]

    def execute(self, source):
        """Run a cell's source on every rank, in the namespace that its cells share.

        Raises:
            RankError: on failure of any rank.
        """
        self._everywhere(engine.execute, source, cell=numbered(source))

    def __getitem__(self, name):
        """The variable ``name`` of the ranks' namespace: a list of its values in rank order.

        Raises:
            RankError: a rank has no variable of that name.
        """
        import cloudpickle

        outcomes = self._everywhere(engine.get, name)
        return [cloudpickle.loads(outcome.pop("value")) for outcome in outcomes]

    def close(self):
        """End every process of this World; without effect on one already closed."""
        if not self._closed:
            self._closed = True
            self._end()
            atexit.unregister(self.close)
            notebook.leave(self)

    # ---- starting and recovering -------------------------------------------------------------

    def _start(self):
        with interrupts.deferred() as check:
            self._ranks = Launched(self.size, self._wanted, check)
            self.backend = self._ranks.backend
            self._epoch = 0
            try:
                self._join()
            except BaseException:
                self._end()
                raise
        self._dead, self._broken = False, None

    def _end(self):
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            ranks.close()

    def _join(self):
        """Form a process group; returns the names of variables that held groups, by rank."""
        self._epoch += 1
        self._ranks.keys.clear()
        arguments = [
            (rank, self.size, m.local_rank, m.threads, self._epoch, self.backend, self.timeout)
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
            with interrupts.deferred():
                lost = sorted(set(itertools.chain(*self._join())))
        except Exception as failure:  # a process group beyond repair: said, and begun anew
            print(f"the process group could not be rebuilt ({type(failure).__name__})")
            self._restart()
            return
        again = f"; create again: {', '.join(lost)}" if lost else ""
        if again or self._broken:
            print(f"the process group was rebuilt{self._broken}{again}")
        self._broken = None

    def _restart(self):
        self._dead = True
        self._end()
        self._start()
        print(f"{named(range(self.size))} restarted; the variables of earlier cells are lost")

    # ---- one cell ------------------------------------------------------------------------------

    def _everywhere(self, function, *args, cell=None):
        self._ready()
        self._dead = True  # until we know better: whatever cuts this off leaves ranks at work
        run = Cell(self._ranks, self.timeout)
        run.run(function, args)
        output.show(run.printed())
        outcomes = run.outcomes
        errors = [outcome["error"] for outcome in outcomes.values() if outcome["error"]]
        exhausted = [rank for rank, outcome in outcomes.items() if outcome.get("exhausted")]
        self._dead = bool(run.died or run.pending or exhausted)
        _say_put_back(outcomes)
        if any(outcome.get("left_group") for outcome in outcomes.values()):
            self._broken = ", because a cell had left it (destroy_process_group)"
        if not (errors or run.died or run.pending or run.interrupted):
            return [outcomes[rank] for rank in range(self.size)]
        # A slip that all ranks made alike, and before any message was late, leaves none ahead of
        # another, and the process group as good as before.
        alike = len(errors) == self.size and len({_what(e) for e in errors}) == 1
        alike = alike and kind(errors[0]) == "cause"
        if self._broken is None and (run.severed or not alike):
            self._broken = ""
        if run.controller_died:
            raise RankError(self._ranks.how_controller_ended()) from None
        if run.interrupted:
            raise RankInterrupt(interruption(outcomes, run.died, run.stuck, cell)) from None
        raise diagnose(outcomes, run.died, run.stuck, self.timeout, cell) from None


def _what(error):
    lines = tuple((line, function) for _, line, function, _ in error["frames"])
    return error["type"], error["message"], error["syntax"], lines


def _say_put_back(outcomes):
    names = {name for outcome in outcomes.values() for name in outcome.get("put_back", ())}
    if names:
        print(f"put back, because every cell finds them at hand: {', '.join(sorted(names))}")
