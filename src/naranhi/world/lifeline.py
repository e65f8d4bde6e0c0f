"""Connect every process of a World by TCP to the notebook that started it.

The connection serves three purposes. When the notebook dies, in whatever way, the kernel closes its
sockets; every process at the other end reads an end of file and kills its own process group. When a
process dies, the notebook notices at once, without waiting for missed heartbeats. And the notebook
can reach a rank that is busy or stuck inside a collective, which the rank's message queue cannot.

A process that is stopped, or busy in C while it holds the interpreter's lock, does not obey. On
this machine such a process is killed by its process id; on another host, by whoever started it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from naranhi.distributed import processes
from naranhi.world import server

INTERRUPT, SEVER, KILL, DONE = b"I", b"S", b"K", b"D"


class Lifelines:
    """Serve the notebook's end, as a service of `server.Server`: track and reach every process.

    A process is identified by `who`, its (host, pid).
    """

    def __init__(self):
        self._namespace = processes.namespace()
        self._connections = {}  # who -> connection
        self._names = {}  # connection -> who
        self._here = set()  # the processes in this machine's process id namespace
        self._done = collections.Counter()  # who -> commands obeyed
        self._changed = threading.Condition()

    def accept(self, connection: socket.socket, hello: dict[str, Any], rest: bytes) -> None:
        """Register the process at the other end of a connection.

        Args:
            connection: the new connection.
            hello: its first message, with `host`, `pid` and `namespace`.
            rest: the bytes received after that message; not used.
        """
        who = (hello["host"], hello["pid"])
        with self._changed:
            self._names[connection] = who
            self._connections[who] = connection
            if hello["namespace"] == self._namespace:
                self._here.add(who)
            self._changed.notify_all()

    def read(self, connection: socket.socket) -> bool:
        """Read from a connection; return False at its end."""
        try:
            answer = connection.recv(1)
        except OSError:
            answer = b""
        who = self._names[connection]
        with self._changed:
            if answer == DONE:
                self._done[who] += 1
            else:
                del self._names[connection], self._connections[who]
                self._here.discard(who)
            self._changed.notify_all()
        return answer == DONE

    def tick(self) -> None:
        """Do nothing: this service has no deadlines."""

    def alive(self, who: tuple[str, int]) -> bool:
        """Return whether the process still holds its end."""
        return who in self._connections

    def is_here(self, who: tuple[str, int]) -> bool:
        """Return whether the process runs on this machine."""
        return who in self._here

    def stopped(self, who: tuple[str, int]) -> bool:
        """Return whether the process is known to be stopped; visible on this machine only."""
        return who in self._here and processes.is_stopped(who[1])

    def tell(
        self, whos: Iterable[tuple[str, int]], command: bytes, seconds: float
    ) -> list[tuple[str, int]]:
        """Send a command to processes, and wait until they have obeyed.

        Args:
            whos: the processes.
            command: `INTERRUPT` or `SEVER`.
            seconds: how long to wait.

        Returns:
            The processes that are alive and had not obeyed after `seconds`.
        """
        with self._changed:
            goals = {}
            for who in whos:
                goals[who] = self._done[who] + 1
                self._send(who, command)

            def silent():
                return [w for w, goal in goals.items() if self.alive(w) and self._done[w] < goal]

            self._changed.wait_for(lambda: not silent(), timeout=seconds)
            return silent()

    def kill(
        self, whos: Iterable[tuple[str, int]] | None = None, seconds: float = 5.0
    ) -> list[tuple[str, int]]:
        """Kill processes.

        Args:
            whos: the processes; default: all.
            seconds: how long to wait for their end.

        Returns:
            The processes that had not ended after `seconds`: on other hosts, stopped or cut off.
        """
        with self._changed:
            whos = list(self._connections if whos is None else whos)
            for who in whos:
                if who in self._here:
                    processes.kill(who[1])
                else:
                    self._send(who, KILL)
            self._changed.wait_for(lambda: not any(map(self.alive, whos)), timeout=seconds)
            return [who for who in whos if self.alive(who)]

    def _send(self, who, command):
        connection = self._connections.get(who)
        if connection is not None:
            with contextlib.suppress(OSError):  # it has ended: its end of file is in flight
                connection.sendall(command)


def hold(
    handlers: dict[bytes, Callable[[], None]], on_end: Callable[[bool], object] | None = None
) -> None:
    """Hold the process's end: connect to the notebook named in the environment and obey it.

    Args:
        handlers: command -> the function to call, for `INTERRUPT` and `SEVER`.
        on_end: called before this process group is killed; its argument says whether the notebook
            is lost.
    """
    connection = server.connect(
        "lifeline",
        host=socket.gethostname(),
        pid=os.getpid(),
        namespace=processes.namespace(),
    )
    # A forked child that outlives this process would keep the connection open, so that the
    # notebook would think that this process is alive.
    os.register_at_fork(after_in_child=connection.close)

    def obey():
        while True:
            try:
                command = connection.recv(1)
            except OSError:
                command = b""
            if command in handlers:
                try:
                    handlers[command]()
                except Exception:  # such as no descriptor left: report nothing, keep serving
                    continue
                with contextlib.suppress(OSError):  # the notebook is gone, which `recv` says next
                    connection.sendall(DONE)
            else:  # KILL, or the end of file from a notebook that is gone
                try:
                    if on_end is not None:
                        on_end(command == b"")
                finally:  # even if `on_end` fails, no process is left
                    end_process_group()

    threading.Thread(target=obey, name="naranhi-lifeline", daemon=True).start()


def end_process_group() -> None:
    """Kill this process and what it started, by a signal that they cannot handle."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
    time.sleep(60)
