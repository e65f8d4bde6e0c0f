"""Listen in the notebook, and accept only processes that know the World's secret.

A connection begins with one line of JSON: the secret, who connects, and the service it wants. Until
that line is complete the connection is a stranger. A stranger may send `HELLO_BYTES` and has
`HELLO_SECONDS`; the server never waits for a stranger, so a stranger delays nobody.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from typing import Any

ADDRESS = "NARANHI_ADDRESS"  # environment variables of a World's processes
FOLDER = "NARANHI_FOLDER"
HELLO_BYTES = 1024
HELLO_SECONDS = 5.0
SEND_SECONDS = 5.0  # a stopped process does not read, and must not block the server for longer
STRANGERS = 64  # at a time; beyond that the oldest is closed
TICK = 0.2
_servers = weakref.WeakSet()


class Server:
    """Run one thread that accepts connections and passes what they send to services.

    Args:
        host: the address to listen on; the system chooses the port.
        services: by name. A service has `accept(connection, hello, rest)`, where `rest` are the
            bytes that followed the first line; `read(connection)`, called when there is something
            to read, which returns False at the end; and `tick()`, called often.
    """

    def __init__(self, host: str, **services: Any):
        self._services = services
        self._secret = secrets.token_hex(16)
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self.address: str = "{}:{}:{}".format(*self._listener.getsockname()[:2], self._secret)
        self._strangers = {}  # connection -> (what it has sent, its deadline), the oldest first
        self._connections = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._open = True
        _servers.add(self)
        threading.Thread(target=self._serve, name="naranhi-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening and close every connection."""
        self._open = False

    def forget(self) -> None:
        """Close the sockets in this process."""
        self._open = False
        for connection in [self._listener, *self._strangers, *self._connections]:
            connection.close()

    def _serve(self):
        while self._open:
            for key, _ in self._selector.select(timeout=TICK):
                key.data(key.fileobj)
            self._close_overdue()
            for service in self._services.values():
                service.tick()
        self.forget()
        self._selector.close()

    def _accept(self, listener):
        try:
            connection, _ = listener.accept()
        except OSError:  # the peer is gone; or no descriptor is left, so close a stranger
            self._close_stranger()
            return
        connection.setblocking(False)
        self._strangers[connection] = b"", time.monotonic() + HELLO_SECONDS
        self._selector.register(connection, selectors.EVENT_READ, self._greet)
        if len(self._strangers) > STRANGERS:
            self._close_stranger()

    def _greet(self, connection):
        if connection not in self._strangers:  # closed since it was found ready
            return
        sent, deadline = self._strangers[connection]
        try:
            data = connection.recv(HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        line, newline, rest = (sent + data).partition(b"\n")
        if not newline and data and len(line) < HELLO_BYTES:
            self._strangers[connection] = line, deadline
            return
        hello = self._authenticated(line) if newline else None
        if hello is None:
            self._close_stranger(connection)
            return
        del self._strangers[connection]
        self._connections.add(connection)
        connection.settimeout(SEND_SECONDS)
        tune(connection)
        service = self._services[hello["service"]]
        self._selector.modify(connection, selectors.EVENT_READ, self._reader(service))
        service.accept(connection, hello, rest)

    def _authenticated(self, line):
        """Return the hello of one of our processes, or None."""
        try:
            hello = json.loads(line)
            ours = secrets.compare_digest(hello.pop("secret"), self._secret)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return hello if ours and hello.get("service") in self._services else None

    def _reader(self, service):
        def read(connection):
            if not service.read(connection):
                self._selector.unregister(connection)
                self._connections.discard(connection)
                connection.close()

        return read

    def _close_overdue(self):
        # This thread may have had to wait for the interpreter (the notebook loads torch, and a
        # library that is loaded keeps the interpreter's lock), so read data sent in time first.
        now = time.monotonic()
        for connection, (_, deadline) in list(self._strangers.items()):
            if now > deadline:
                self._greet(connection)
                if connection in self._strangers:
                    self._close_stranger(connection)

    def _close_stranger(self, connection=None):
        """Close this stranger, by default the oldest, if any."""
        connection = connection or next(iter(self._strangers), None)
        if connection is not None:
            del self._strangers[connection]
            self._selector.unregister(connection)
            connection.close()


def connect(service: str, **who: Any) -> socket.socket:
    """Connect to the server named in the environment; return the connection.

    Args:
        service: the name of the service.
        who: the facts about this process that the service needs.
    """
    host, port, secret = _address()
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.settimeout(None)
    tune(connection)
    hello = {"secret": secret, "service": service, **who}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return connection


def host() -> str:
    """Return the host of the server named in the environment."""
    return _address()[0]


def _address():
    return os.environ[ADDRESS].rsplit(":", 2)


def tune(connection: socket.socket) -> None:
    """Make a connection send at once, and fail within 15 s if the host or the link is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)


def _forget_all():
    for server in list(_servers):
        server.forget()


# A forked child of the notebook would keep these sockets open after the notebook's death.
os.register_at_fork(after_in_child=_forget_all)
