"""Ranks in a notebook: a World of processes that live as long as the notebook.

Built on ipyparallel. A cell that begins with ``%%ranks`` runs on every rank; ``world.run`` calls a
function on every rank. Output comes in rank order, a failure is one ``RankError``, and nothing
outlives the notebook.
"""

import atexit
import itertools
import time

from naranhi._ranks import lifeline, output, process
from naranhi._ranks.failures import RankError, RankInterrupt, diagnose, kind, named, numbered, place
from naranhi._ranks.launch import Launched

__all__ = ["RankError", "RankInterrupt", "World"]

_current = None


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
        global _current
        if isinstance(ranks, bool) or not isinstance(ranks, int):
            raise TypeError(f"World needs a whole number of ranks, not {ranks!r}")
        if ranks < 1:
            raise ValueError(f"World needs at least one rank, not {ranks}")
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        if backend not in (None, "gloo", "nccl"):
            raise ValueError(f"backend {backend!r} does not exist here; choose 'gloo' or 'nccl'")
        self.size = ranks
        self.timeout = timeout
        self._wanted = backend
        self._ranks = self._members = None
        if _current is not None:
            _current.close()  # a notebook has one World; a cell run twice starts it anew
        self._start()
        _current = self
        atexit.register(self.close)
        _prepare_notebook()

    def __repr__(self):
        if self._ranks is None:
            return f"<World of {self.size}, closed>"
        return f"<World of {self.size}, {self.backend}>"

    # ---- running ---------------------------------------------------------------------------

    def run(self, function, *args, **kwargs):
        """Call ``function(*args, **kwargs)`` on every rank.

        What it prints is shown in rank order. The function and its arguments travel by
        cloudpickle, so a function defined in the notebook will do.

        Returns:
            The list of results, in rank order.

        Raises:
            RankError: on failure of any rank.
        """
        import cloudpickle

        pickled = cloudpickle.dumps((function, args, kwargs))
        outcomes = self._everywhere(process.call, pickled)
        return [cloudpickle.loads(outcome["value"]) for outcome in outcomes]

    def execute(self, source):
        """Run a cell's source on every rank, in the namespace that its cells share.

        Raises:
            RankError: on failure of any rank.
        """
        self._everywhere(process.execute, source, cell=numbered(source))

    def __getitem__(self, name):
        """The variable ``name`` of the ranks' namespace: a list of its values in rank order.

        Raises:
            RankError: a rank has no variable of that name.
        """
        import cloudpickle

        outcomes = self._everywhere(process.get, name)
        return [cloudpickle.loads(outcome["value"]) for outcome in outcomes]

    def close(self):
        """End every process of this World; without effect on one already closed."""
        global _current
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
            atexit.unregister(self.close)
        if _current is self:
            _current = None
            _release_notebook()

    # ---- starting and recovering -------------------------------------------------------------

    def _start(self):
        self._ranks = Launched(self.size, self._wanted)
        self._members = self._ranks.members
        self.backend = self._ranks.backend
        self._epoch = 0
        self._broken = self._dead = False
        self._join()

    def _join(self):
        self._epoch += 1
        arguments = [
            (
                rank,
                self.size,
                member.local_rank,
                member.threads,
                self._ranks.store_address,
                self._epoch,
                self.backend,
                self.timeout,
            )
            for rank, member in enumerate(self._members)
        ]
        pending = [
            self._ranks.submit(m, process.join, *a)
            for m, a in zip(self._members, arguments, strict=True)
        ]
        return [p.get(timeout=60) for p in pending]

    def _ready(self):
        if self._ranks is None:
            raise RankError("this World is closed; start another: world = naranhi.World(4)")
        gone = [r for r, m in enumerate(self._members) if not self._ranks.alive(m)]
        if gone and not self._dead:
            self._dead = True
            print(f"{named(gone)} died since the last cell")
        if self._dead:
            self._restart()
        elif self._broken:
            self._rebuild()

    def _rebuild(self):
        try:
            lost = sorted(set(itertools.chain(*self._join())))
        except Exception as failure:  # a process group beyond repair: said, and begun anew
            print(f"the process group could not be rebuilt ({type(failure).__name__})")
            self._restart()
            return
        self._broken = False
        if lost:
            print(f"the process group was rebuilt; create again: {', '.join(lost)}")

    def _restart(self):
        self._ranks.close()
        self._start()
        print(f"{named(range(self.size))} restarted; the variables of earlier cells are lost")

    # ---- one cell ------------------------------------------------------------------------------

    def _everywhere(self, function, *args, cell=None):
        self._ready()
        pending = {
            rank: self._ranks.submit(member, function, *args)
            for rank, member in enumerate(self._members)
        }
        outcomes, died, stuck = {}, {}, []
        interrupted = False
        try:
            self._collect(pending, outcomes, died)
            if pending:
                stuck = self._unblock(pending, outcomes, died, cell)
        except KeyboardInterrupt:
            interrupted = self._dead = True  # until we know better: a second one may come
            self._unblock(pending, outcomes, died, cell, interrupt_at_once=True)
        output.show(outcomes)
        errors = [o["error"] for o in outcomes.values() if o["error"]]
        if not (errors or died or pending or interrupted):
            return [outcomes[rank] for rank in range(self.size)]
        self._dead = bool(died or pending)
        # A slip that all ranks made alike, and before any message was late, leaves none ahead of
        # another, and the process group as good as before.
        alike = len(errors) == self.size and len({_what(e) for e in errors}) == 1
        alike = alike and kind(errors[0]) == "cause"
        self._broken = self._broken or not alike or interrupted
        if interrupted:
            raise RankInterrupt(_interruption(outcomes, died, pending, cell)) from None
        raise diagnose(outcomes, died, stuck, self.timeout, cell) from None

    def _collect(self, pending, outcomes, died, seconds=None, until_failure=True):
        """Move what has finished from ``pending`` to ``outcomes``, and the dead to ``died``."""
        end = None if seconds is None else time.monotonic() + seconds
        while pending and (end is None or time.monotonic() < end):
            failed = False
            for rank, result in list(pending.items()):
                if result.ready():
                    outcomes[rank] = pending.pop(rank) and result.get()
                    failed = failed or outcomes[rank]["error"] is not None
                elif not self._ranks.alive(self._members[rank]):
                    del pending[rank]
                    died[rank] = self._ranks.how_it_ended(self._members[rank])
                    failed = True
            if failed and until_failure:
                return
            if pending:
                next(iter(pending.values())).wait(0.02)

    def _unblock(self, pending, outcomes, died, cell, interrupt_at_once=False):
        """After a failure the others may wait for a peer that will not come: end their wait.

        Returns:
            The ranks that were busy with something else than waiting.
        """
        if not interrupt_at_once:
            # Those about to fail by themselves (the same slip on every rank) are given the time.
            self._collect(pending, outcomes, died, 0.3, until_failure=False)
            if not pending:
                return []
        # First the connections: a rank that waits in C++ sees a signal only when that wait ends.
        for rank in [*outcomes, *pending]:
            if rank in pending or outcomes[rank]["error"]:
                self._ranks.tell(self._members[rank], lifeline.SEVER)
        self._collect(pending, outcomes, died, 1.0, until_failure=False)
        stuck = sorted(pending)
        for rank in pending:
            self._ranks.tell(self._members[rank], lifeline.INTERRUPT)
        self._collect(pending, outcomes, died, 2.0, until_failure=False)
        if pending:
            self._ranks.kill([self._members[rank] for rank in pending])
        return stuck


def _what(error):
    lines = tuple((line, function) for _, line, function, _ in error["frames"])
    return error["type"], error["message"], error["syntax"], lines


def _interruption(outcomes, died, killed, cell):
    text = "the cell was interrupted"
    for rank, outcome in sorted(outcomes.items()):
        if outcome["error"]:
            text += f"\n  rank {rank} was stopped{place(outcome['error'], cell)}"
    for rank in sorted([*died, *killed]):
        text += f"\n  rank {rank} did not stop and was ended"
    return text


# ---- the notebook ------------------------------------------------------------------------------

_original_init = None


def _prepare_notebook():
    """Register ``%%ranks``, and keep the notebook's own process from posing as a rank."""
    global _original_init
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    shell.register_magic_function(_ranks_magic, "cell", "ranks")
    import torch.distributed as dist

    if _original_init is None:
        _original_init = dist.init_process_group
        dist.init_process_group = _not_here


def _release_notebook():
    global _original_init
    if _original_init is not None:
        import torch.distributed as dist

        dist.init_process_group = _original_init
        _original_init = None


def _not_here(*args, **kwargs):
    raise RankError(
        "this cell runs in the notebook's own process, which is not a rank and can join no process "
        "group; begin the cell with %%ranks to run it on the ranks, which have joined theirs"
    )


def _ranks_magic(line, cell):
    """Run the cell on every rank of the World."""
    if _current is None:
        raise RankError("there are no ranks yet; start them: world = naranhi.World(4)")
    if line.strip():
        raise ValueError(f"%%ranks takes no arguments, and got {line.strip()!r}")
    _current.execute(cell)
