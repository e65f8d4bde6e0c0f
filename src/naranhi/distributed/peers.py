"""How the ranks of a training run watch each other: which have ended, and which are silent.

Each rank writes its process id, and then one beat per second, to the store of the default group,
and watches the beats of the next rank. If that rank is silent for too long, the watching rank
reports which rank it is, then ends; the launcher ends the other ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable

import torch.distributed as dist

from naranhi.distributed import processes

BEAT = 1.0  # seconds


class Peers:
    """A watch over the other ranks of the default group; make it on every rank after joining.

    Args:
        silence: seconds without a beat after which a rank counts as lost.
        give_up: called from a thread with a sentence that names the lost rank.
    """

    def __init__(self, silence: float, give_up: Callable[[str], object]):
        self._silence, self._give_up = silence, give_up
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        # A separate connection, because another thread may be waiting on the default one.
        self._store = dist.distributed_c10d._get_default_store().clone()
        self._set("place", (socket.gethostname(), processes.namespace(), os.getpid()))
        self._places = [self._get("place", rank) for rank in range(self._ranks)]
        self._looks = 0
        self._stopped = threading.Event()
        if self._ranks > 1:
            for function in (self._beat, self._watch_the_store):
                threading.Thread(target=function, name="naranhi-peers", daemon=True).start()

    def close(self) -> None:
        """Stop beating and watching: from now on ranks may end."""
        self._stopped.set()

    def gone(self) -> list[int]:
        """Return the ranks on this host whose processes have ended."""
        return [rank for rank, pid in self._here() if processes.is_gone(pid)]

    def kill_stopped(self) -> None:
        """Kill the ranks on this host that are stopped, since no other signal ends them."""
        for _, pid in self._here():
            if processes.is_stopped(pid):
                processes.kill(pid)

    def _here(self):
        namespace = processes.namespace()
        return [(r, pid) for r, (_, where, pid) in enumerate(self._places) if where == namespace]

    def _set(self, what, value):
        self._store.set(f"naranhi/{what}/{self._rank}", json.dumps(value))

    def _get(self, what, rank):
        return json.loads(self._store.get(f"naranhi/{what}/{rank}"))

    def _beat(self):
        """Beat, and watch the next rank. Count looks, not time, because this rank may stop too."""
        following, last, silent = (self._rank + 1) % self._ranks, None, 0.0
        try:
            self._set("beat", 0)
            while not self._stopped.wait(BEAT):
                self._looks += 1
                self._set("beat", self._looks)
                beat = self._get("beat", following)
                silent = 0.0 if beat != last else silent + BEAT
                last = beat
                if silent >= self._silence:
                    self._name(following)
                    return
        except dist.DistError as error:
            if not self._stopped.is_set():
                cause = str(error).partition("\n")[0]
                self._give_up(
                    f"the store of the ranks is gone, with the process that kept it: {cause}"
                )

    def _watch_the_store(self):
        """Give up if `_beat` hangs: a store whose keeper or host is gone or stopped is silent."""
        last, silent = None, 0.0
        while not self._stopped.wait(BEAT):
            silent = 0.0 if self._looks != last else silent + BEAT
            last = self._looks
            if silent >= self._silence + 2 * BEAT:
                # Beside torchrun, no rank keeps the store.
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                    self._name_agent()
                else:
                    self._name(0)
                return

    def _name(self, rank):
        host, namespace, pid = self._places[rank]
        self._blame(f"rank {rank} on {host}", pid if namespace == processes.namespace() else None)

    def _name_agent(self):
        """Give up on torchrun's store; its process is known if all ranks are on this host."""
        place = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
        alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        self._blame(
            f"the store of the ranks at {place}, which torchrun keeps,",
            os.getppid() if alone else None,
        )

    def _blame(self, who, pid):
        """Give up on a process; `pid` is None if it is on another host."""
        if self._stopped.is_set():
            return
        state = "it answers nobody"
        if pid is not None and processes.is_stopped(pid):
            state = f"its process {pid} is stopped; kill -CONT {pid} would have woken it"
        elif pid is not None and processes.is_gone(pid):
            state = f"its process {pid} has ended"
        self._give_up(f"{who} was silent for {self._silence:g} s: {state}")


def on_signals(numbers: Iterable[int], function: Callable[[], object]) -> None:
    """Call `function()` on any of these signals, then end this process at once and silently.

    A thread makes the call, because it runs even while the main thread waits in C++.

    Args:
        numbers: the signals.
        function: what to do before this process ends.
    """
    wanted = set(numbers)
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    for number in wanted:
        signal.signal(number, lambda *_: None)  # without a handler, no byte is written

    def wait():
        while receiver.recv(1)[0] not in wanted:  # other handlers' signals are written as well
            pass
        try:
            function()
        finally:
            processes.kill(os.getpid())

    threading.Thread(target=wait, name="naranhi-signals", daemon=True).start()
