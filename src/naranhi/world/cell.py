"""Run one call on every rank of a World, until each rank has answered, died or been killed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from naranhi.world import interrupts, lifeline
from naranhi.world.errors import BUSY, DEAF, FROZEN, UNREACHABLE, kind

if TYPE_CHECKING:
    from ipyparallel import AsyncResult

    from naranhi.world.launch import Launched

PAUSE = 0.4  # seconds without an answer after which the other ranks are assumed to be waiting
LONGEST_PAUSE = 2.0  # seconds; the pause grows up to this if the first answer was slow as well
GLANCE = 0.5  # seconds between two checks for stopped processes
GRACE = 2.0  # seconds beyond the deadline, so that ranks waiting for a stopped rank report first


class Cell:
    """Hold the state of one call.

    Args:
        ranks: the `launch.Launched` to run it on.
        timeout: seconds after which a stopped process counts as frozen.

    Attributes:
        outcomes: rank -> outcome (see `outcome`), for the ranks that answered.
        died: rank -> how its process ended, for the processes that are gone.
        stuck: rank -> what it was doing, for ranks that were not waiting when others had failed.
        pending: rank -> its future result; at the end, the ranks whose processes were killed.
        interrupted: whether the user interrupted the call.
        severed: whether connections of the process group were shut down.
        controller_died: whether the controller died, so that no more answers can arrive.
    """

    outcomes: dict[int, dict[str, Any]]
    died: dict[int, str]
    stuck: dict[int, str]
    pending: dict[int, AsyncResult]
    interrupted: bool
    severed: bool
    controller_died: bool

    def __init__(self, ranks: Launched, timeout: float):
        self._ranks, self._timeout = ranks, timeout
        self._start = self._glanced = time.monotonic()
        self._stopped = {}  # rank -> when its process was first seen stopped
        self.outcomes, self.died, self.stuck, self.pending = {}, {}, {}, {}
        self.interrupted = self.severed = self.controller_died = False

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Call `function(*args)`, a function of `engine`, on every rank."""
        try:
            with interrupts.deferred():  # submit to all ranks or to none
                for rank, member in enumerate(self._ranks.members):
                    self.pending[rank] = self._ranks.submit(member, function, *args)
            self._collect()
            if self.pending and not self.controller_died:
                self._release()
        except KeyboardInterrupt:
            self.interrupted = True
            # A second Ctrl-C must not lose what the ranks have printed, and their variables.
            with contextlib.suppress(KeyboardInterrupt), interrupts.deferred():
                self._release(at_once=True)

    def printed(self) -> dict[int, dict[str, Any]]:
        """Return what to show of each rank, including the ranks that never answered."""
        shown = dict(self.outcomes)
        for rank in {*self.died, *self.pending}:
            stdout, stderr = self._ranks.unseen(self._ranks.members[rank])
            shown[rank] = {"stdout": stdout, "stderr": stderr, "displays": []}
        return shown

    def _collect(self, seconds=None, until_failure=True):
        """Move finished results from `pending` to `outcomes`, and dead ranks to `died`."""
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
        """Return whether a rank has failed or died since the last call."""
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
        """Return whether a pending rank's process has been stopped for too long."""
        now = time.monotonic()
        if now - self._glanced > GLANCE:
            self._glanced = now
            stopped = [rank for rank in self.pending if self._is_stopped(rank)]
            self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped}
        return any(now - since > self._timeout + GRACE for since in self._stopped.values())

    def _is_stopped(self, rank):
        return self._ranks.lifelines.stopped(self._ranks.members[rank].who)

    def _release(self, at_once=False):
        """End the wait of the other ranks after a failure: their peer may never send."""
        if not at_once and self._others_fail_as_well():
            return
        self.severed = True
        # Connections first: a rank waiting in C++ sees a signal only when that wait ends.
        failed = [rank for rank, outcome in self.outcomes.items() if outcome["error"]]
        silent = self._tell([*failed, *self.pending], lifeline.SEVER, 2.0)
        self._collect(1.0, until_failure=False)
        self.stuck = {rank: self._state(rank, silent) for rank in sorted(self.pending)}
        silent = self._tell(list(self.pending), lifeline.INTERRUPT, 1.0)
        self._collect(1.0, until_failure=False)
        if set(self.pending) - set(silent):  # they received the signal; a busy machine is slow
            self._collect(4.0, until_failure=False)
        self._ranks.lifelines.kill([self._ranks.members[rank].who for rank in self.pending])

    def _others_fail_as_well(self):
        """Wait for ranks that are about to fail by themselves; return whether none is pending.

        An error that every rank raises alike must not cost them their process group.
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
        """Send a command; return the ranks that have not obeyed."""
        whos = {self._ranks.members[rank].who: rank for rank in ranks if not self._is_stopped(rank)}
        return [whos[who] for who in self._ranks.lifelines.tell(whos, command, seconds)]

    def _state(self, rank, silent):
        if self._is_stopped(rank):
            return FROZEN
        if rank in silent:
            alive = self._ranks.lifelines.is_here(self._ranks.members[rank].who)
            return DEAF if alive else UNREACHABLE
        return BUSY
