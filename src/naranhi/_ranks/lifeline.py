"""A TCP connection from every process of a World to the notebook that started it.

It serves three ends. When the notebook dies, however it dies, the kernel closes its sockets and
every process at the other end reads an end of file and kills its own process group. When a process
dies, the notebook notices at once, without waiting for missed heartbeats. And the notebook can
reach a rank that is busy or stuck inside a collective, which the rank's message queue cannot.
"""

import collections
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time

ADDRESS = "NARANHI_LIFELINE"
INTERRUPT, SEVER, KILL, DONE = b"I", b"S", b"K", b"D"


class Lifelines:
    """The notebook's end: who is alive, and a way to reach each.

    Args:
        host: the address to listen on; the port is the system's choice.
    """

    def __init__(self, host):
        self._server = socket.create_server((host, 0))
        self._secret = secrets.token_hex(16)
        self.address = "{}:{}:{}".format(*self._server.getsockname()[:2], self._secret)
        self._connections = {}  # (host, pid) -> connection
        self._done = collections.Counter()  # (host, pid) -> commands obeyed
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._changed = threading.Condition()
        self._open = True
        # A forked child of the notebook would keep these sockets open after the notebook's death.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, name="naranhi-lifelines", daemon=True).start()

    def _forget(self):
        self._open = False
        for connection in [self._server, *self._connections.values()]:
            connection.close()

    def _watch(self):
        while self._open:
            for key, _ in self._selector.select(timeout=0.2):
                if key.fileobj is self._server:
                    self._welcome(self._server.accept()[0])
                elif self._acknowledged(key.fileobj):
                    self._count(key.data)
                else:
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()
                    self._put(key.data, None)
        self._forget()

    def _welcome(self, connection):
        try:
            connection.settimeout(5)
            hello = json.loads(connection.makefile().readline())
            if hello.pop("secret") != self._secret:
                raise ValueError("somebody else's process")
            connection.settimeout(None)
        except (OSError, ValueError, KeyError):  # whoever this is, it is none of ours
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, hello)
        self._put(hello, connection)

    @staticmethod
    def _acknowledged(connection):
        try:
            return connection.recv(1) == DONE
        except OSError:
            return False

    def _count(self, hello):
        with self._changed:
            self._done[hello["host"], hello["pid"]] += 1
            self._changed.notify_all()

    def _put(self, hello, connection):
        who = (hello["host"], hello["pid"])
        with self._changed:
            if connection is None:
                self._connections.pop(who, None)
            else:
                self._connections[who] = connection
            self._changed.notify_all()

    def alive(self, who):
        """Whether the process ``who``, a (host, pid), still holds its end."""
        return who in self._connections

    def tell(self, who, command):
        """Send INTERRUPT, SEVER or KILL to the process ``who``; returns when it has been obeyed.

        Without effect on a process that is gone.
        """
        with self._changed:
            connection = self._connections.get(who)
            before = self._done[who]
            if connection is not None:
                try:
                    connection.sendall(command)
                except OSError:  # gone since we looked; its end of file is on its way
                    return
                self._changed.wait_for(
                    lambda: self._done[who] > before or not self.alive(who), timeout=5
                )

    def kill(self, whos=None):
        """Kill these processes (all by default) and wait until they are gone."""
        for who in list(self._connections) if whos is None else whos:
            self.tell(who, KILL)

    def close(self):
        """Kill every process and stop listening."""
        self.kill()
        self._open = False


def hold(handlers, on_lost=None):
    """The other end: connect to the notebook named in the environment and obey it.

    Args:
        handlers: what to call on INTERRUPT and on SEVER.
        on_lost: called before this process group is killed because the notebook is gone.
    """
    host, port, secret = os.environ[ADDRESS].rsplit(":", 2)
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.settimeout(None)
    hello = {"host": socket.gethostname(), "pid": os.getpid(), "secret": secret}
    connection.sendall(json.dumps(hello).encode() + b"\n")

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
                if command == b"" and on_lost is not None:
                    on_lost()
                end_process_group()

    threading.Thread(target=obey, name="naranhi-lifeline", daemon=True).start()


def end_process_group():
    """Kill this process and what it started, leaving it no say in the matter."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
    time.sleep(60)
