"""One call on every rank of a World, until each has answered, has died or has been ended."""

import time

from naranhi.world import interrupts, lifeline
from naranhi.world.errors import BUSY, DEAF, FROZEN, UNREACHABLE, kind

PAUSE = 0.4  # seconds without an answer after which the other ranks are taken to be waiting;
LONGEST_PAUSE = 2.0  # longer, up to this, where already the first answer took longer
GLANCE = 0.5  # seconds between two looks at whether processes are stopped
GRACE = 2.0  # seconds beyond the deadline, so that ranks that wait for a stopped one speak first


class Cell:
    """What happens to one call.

    Args:
        ranks: the `launch.Launched` that it runs on.
        timeout: after how many seconds a process that is stopped counts as frozen.

    Attributes:
        outcomes: rank -> outcome (see `outcome`), of the ranks that answered.
        died: rank -> how its process ended, of those that are gone.
        stuck: rank -> what it did, of those that were not waiting when others had failed.
        pending: rank -> its result to come; at the end those whose processes were ended.
        interrupted: whether the reader has interrupted it.
        severed: whether connections of the process group were shut down.
        controller_died: whether no answer can come any more.
    """

    def __init__(self, ranks, timeout):
        self._ranks, self._timeout = ranks, timeout
        self._start = self._glanced = time.monotonic()
        self._stopped = {}  # rank -> since when its process has been seen stopped
        self.outcomes, self.died, self.stuck, self.pending = {}, {}, {}, {}
        self.interrupted = self.severed = self.controller_died = False

    def run(self, function, args):
        """Call ``function(*args)`` of `process` on every rank."""
        try:
            with interrupts.deferred():  # all ranks or none
                for rank, member in enumerate(self._ranks.members):
                    self.pending[rank] = self._ranks.submit(member, function, *args)
            self._collect()
            if self.pending and not self.controller_died:
                self._release()
        except KeyboardInterrupt:
            self.interrupted = True
            self._release(at_once=True)

    def printed(self):
        """What there is to show of each rank: also of those that never answered."""
        shown = dict(self.outcomes)
        for rank in {*self.died, *self.pending}:
            stdout, stderr = self._ranks.unseen(self._ranks.members[rank])
            shown[rank] = {"stdout": stdout, "stderr": stderr, "displays": []}
        return shown

    def _collect(self, seconds=None, until_failure=True):
        """Move what has finished from ``pending`` to ``outcomes``, and the dead to ``died``."""
        end = None if seconds is None else time.monotonic() + seconds
        while self.pending and (end is None or time.monotonic() < end):
            failed = self._look_for_answers()
            if not self._ranks.controller_alive():
                self.controller_died = True
                return
            if (failed or self._look_for_frozen()) and until_failure:
                return
            if self.pending:
                next(iter(self.pending.values())).wait(0.02)

    def _look_for_answers(self):
        """Whether a rank has failed or died since the last look."""
        failed = False
        for rank, result in list(self.pending.items()):
            member = self._ranks.members[rank]
            if result.ready():
                outcome = self.outcomes[rank] = self._ranks.result(self.pending.pop(rank))
                member.shown = outcome.get("shown", member.shown)
                failed = failed or outcome["error"] is not None
            elif not self._ranks.lifelines.alive(member.who):
                del self.pending[rank]
                self.died[rank] = self._ranks.how_it_ended(member)
                failed = True
        return failed

    def _look_for_frozen(self):
        """Whether a process that is waited for has been stopped for too long."""
        now = time.monotonic()
        if now - self._glanced > GLANCE:
            self._glanced = now
            stopped = [rank for rank in self.pending if self._is_stopped(rank)]
            self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped}
        return any(now - since > self._timeout + GRACE for since in self._stopped.values())

    def _is_stopped(self, rank):
        return self._ranks.lifelines.stopped(self._ranks.members[rank].who)

    def _release(self, at_once=False):
        """After a failure the others may wait for a peer that will not come: end their wait."""
        if not at_once and self._others_fail_as_well():
            return
        self.severed = True
        # First the connections: a rank that waits in C++ sees a signal only when that wait ends.
        failed = [rank for rank, outcome in self.outcomes.items() if outcome["error"]]
        silent = self._tell([*failed, *self.pending], lifeline.SEVER, 2.0)
        self._collect(1.0, until_failure=False)
        self.stuck = {rank: self._state(rank, silent) for rank in sorted(self.pending)}
        silent = self._tell(list(self.pending), lifeline.INTERRUPT, 1.0)
        self._collect(1.0, until_failure=False)
        if set(self.pending) - set(silent):  # these have heard it, and a busy machine is slow
            self._collect(4.0, until_failure=False)
        self._ranks.lifelines.kill([self._ranks.members[rank].who for rank in self.pending])

    def _others_fail_as_well(self):
        """Give time to those about to fail by themselves; returns whether all have.

        A slip that every rank makes alike shall not cost them their process group.
        """
        pause, last = PAUSE, time.monotonic()
        errors = [outcome["error"] for outcome in self.outcomes.values() if outcome["error"]]
        if any(kind(error) == "cause" for error in errors):
            pause = min(max(PAUSE, 2 * (last - self._start)), LONGEST_PAUSE)
        while self.pending and time.monotonic() - last < pause:
            pending = len(self.pending)
            self._collect(0.1, until_failure=False)
            if len(self.pending) < pending:
                last = time.monotonic()
        return not self.pending

    def _tell(self, ranks, command, seconds):
        """Send a command; returns the ranks that have not obeyed."""
        whos = {self._ranks.members[rank].who: rank for rank in ranks if not self._is_stopped(rank)}
        return [whos[who] for who in self._ranks.lifelines.tell(whos, command, seconds)]

    def _state(self, rank, silent):
        if self._is_stopped(rank):
            return FROZEN
        if rank in silent:
            here = self._ranks.lifelines.is_here(self._ranks.members[rank].who)
            return DEAF if here else UNREACHABLE
        return BUSY
