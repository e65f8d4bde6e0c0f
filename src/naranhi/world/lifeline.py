"""A TCP connection from every process of a World to the notebook that started it.

It serves three ends. When the notebook dies, however it dies, the kernel closes its sockets and
every process at the other end reads an end of file and kills its own process group. When a process
dies, the notebook notices at once, without waiting for missed heartbeats. And the notebook can
reach a rank that is busy or stuck inside a collective, which the rank's message queue cannot.

A process that is stopped, or busy in C with the interpreter's lock held, obeys nothing. On this
machine it is killed by its process id; elsewhere by whoever started it there.
"""

import collections
import contextlib
import os
import signal
import socket
import threading
import time

from naranhi.distributed import processes
from naranhi.world import server

INTERRUPT, SEVER, KILL, DONE = b"I", b"S", b"K", b"D"


class Lifelines:
    """The notebook's end, a service of `server.Server`: who is alive, and a way to reach each.

    A process is known by ``who``, its (host, pid).
    """

    def __init__(self):
        self._namespace = processes.namespace()
        self._connections = {}  # who -> connection
        self._names = {}  # connection -> who
        self._here = set()  # those whose process ids are this machine's
        self._done = collections.Counter()  # who -> commands obeyed
        self._changed = threading.Condition()

    def accept(self, connection, hello, rest):
        who = (hello["host"], hello["pid"])
        with self._changed:
            self._names[connection] = who
            self._connections[who] = connection
            if hello["namespace"] == self._namespace:
                self._here.add(who)
            self._changed.notify_all()

    def read(self, connection):
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

    def tick(self):
        """Nothing here depends on time."""

    def alive(self, who):
        """Whether the process still holds its end."""
        return who in self._connections

    def is_here(self, who):
        """Whether it is a process of this machine."""
        return who in self._here

    def stopped(self, who):
        """Whether the process is known to be stopped, which can be told on this machine only."""
        return who in self._here and processes.is_stopped(who[1])

    def tell(self, whos, command, seconds):
        """Send INTERRUPT or SEVER to these processes, and wait until they have obeyed.

        Returns:
            Those that live and had not obeyed after ``seconds``.
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

    def kill(self, whos=None, seconds=5.0):
        """Kill these processes, by default all.

        Returns:
            Those that had not ended after ``seconds``: on other hosts, and stopped or cut off.
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
            with contextlib.suppress(OSError):  # gone since we looked: its end of file is under way
                connection.sendall(command)


def hold(handlers, on_end=None):
    """The other end: connect to the notebook named in the environment and obey it.

    Args:
        handlers: what to call on INTERRUPT and on SEVER.
        on_end: called before this process group is killed, with whether the notebook is lost.
    """
    connection = server.connect(
        "lifeline",
        host=socket.gethostname(),
        pid=os.getpid(),
        namespace=processes.namespace(),
    )
    # A forked child that outlives this process would keep it alive in the notebook's eyes.
    os.register_at_fork(after_in_child=connection.close)

    def obey():
        while True:
            try:
                command = connection.recv(1)
            except OSError:
                command = b""
            if command in handlers:
                handlers[command]()
                connection.sendall(DONE)
            else:  # KILL, or the end of file of a notebook that is gone
                if on_end is not None:
                    on_end(command == b"")
                end_process_group()

    threading.Thread(target=obey, name="naranhi-lifeline", daemon=True).start()


def end_process_group():
    """Kill this process and what it started, leaving it no say in the matter."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
    time.sleep(60)
