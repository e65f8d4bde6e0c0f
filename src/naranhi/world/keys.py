"""Hold the keys that the ranks of a World share to form process groups and to compare their calls.

torch's TCPStore accepts anyone who finds its port, and its FileStore serves one machine only. This
store lives in the notebook, behind the World's secret. It also does two things that they cannot: a
meeting sends every rank the calls of all others in one exchange, and the notebook can end a rank's
wait for a key.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import time
from typing import Any

LENGTH = struct.Struct("!I")


class Keys:
    """Serve the store in the notebook, as a service of `server.Server`.

    A request is the name of a method below, without its underscore, and its arguments. The answer
    is a pair: the keys or ranks still missing at the deadline, and the result for the rest.
    """

    def __init__(self):
        self._received = {}  # connection -> bytes of a request that is not complete
        self._waiting = []  # (connection, missing, result, deadline)
        self.clear()

    def clear(self) -> None:
        """Forget everything, for a new process group."""
        self._values = {}
        self._meetings = {}  # name -> {rank: its call}

    def accept(self, connection: socket.socket, hello: dict[str, Any], rest: bytes) -> None:
        """Start to serve a connection.

        Args:
            connection: the new connection.
            hello: its first message; not used.
            rest: the bytes received after that message.
        """
        self._received[connection] = bytearray()
        self._receive(connection, rest)

    def read(self, connection: socket.socket) -> bool:
        """Read from a connection; return False at its end."""
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if data:
            self._receive(connection, data)
        else:
            del self._received[connection]
            self._waiting = [waiter for waiter in self._waiting if waiter[0] is not connection]
        return bool(data)

    def _receive(self, connection, data):
        received = self._received[connection]
        received += data
        try:
            while (request := cut(received)) is not None:
                name, *arguments = request
                getattr(self, f"_{name}")(connection, *arguments)
        except Exception:  # one bad request must not end the thread that serves all ranks
            _hang_up(connection)

    def tick(self) -> None:
        """Answer the waits that have ended: the values have arrived, or the deadline has passed."""
        now, waiting, self._waiting = time.monotonic(), self._waiting, []
        for waiter in waiting:
            connection, missing, result, deadline = waiter
            still = missing()
            if still and now < deadline:
                self._waiting.append(waiter)
            else:
                _answer(connection, still, result())

    def _set(self, connection, key, value):
        self._values[key] = value
        _answer(connection)

    def _get(self, connection, keys, seconds):
        self._waiting.append(
            (
                connection,
                lambda: [key for key in keys if key not in self._values],
                lambda: [self._values.get(key) for key in keys],
                time.monotonic() + seconds,
            )
        )

    def _check(self, connection, keys):
        _answer(connection, result=all(key in self._values for key in keys))

    def _add(self, connection, key, amount):
        total = int(self._values.get(key, 0)) + amount
        self._values[key] = str(total).encode()
        _answer(connection, result=total)

    def _compare_set(self, connection, key, expected, desired):
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        _answer(connection, result=self._values.get(key, expected))

    def _delete(self, connection, key):
        _answer(connection, result=self._values.pop(key, None) is not None)

    def _count(self, connection):
        _answer(connection, result=len(self._values))

    def _meet(self, connection, name, rank, ranks, call, seconds):
        calls = self._meetings.setdefault(name, {})
        calls[rank] = call
        self._waiting.append(
            (
                connection,
                lambda: [rank for rank in ranks if rank not in calls],
                lambda: calls,
                time.monotonic() + seconds,
            )
        )
        if len(calls) == len(ranks):
            del self._meetings[name]


def _answer(connection, missing=(), result=None):
    try:
        connection.sendall(packed((list(missing), result)))
    except OSError:  # its process is gone, or does not read
        _hang_up(connection)


def _hang_up(connection):
    """End a connection: its process sees the end of file, and so does `read`."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def packed(value: Any) -> bytes:
    """Pack a value into a message: its length, then its pickle."""
    data = pickle.dumps(value)
    return LENGTH.pack(len(data)) + data


def cut(received: bytearray) -> Any:
    """Remove the first message from the received bytes and return it, or None if incomplete."""
    end = LENGTH.size
    if len(received) >= end:
        end += LENGTH.unpack_from(received)[0]
        if len(received) >= end:
            value = pickle.loads(received[LENGTH.size : end])
            del received[:end]
            return value
    return None
