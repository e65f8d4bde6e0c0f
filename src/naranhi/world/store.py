"""A rank's end of the keys that the ranks of a World share (see `keys`)."""

import os
import threading

import torch.distributed as dist

from naranhi.world import server
from naranhi.world.keys import cut, packed


class Severed(RuntimeError):
    """The notebook ended the wait, because another rank has failed."""


class Store(dist.Store):
    """A rank's end: a store for ``init_process_group``, and `meet`.

    Each thread has a connection of its own, so that one that waits holds up no other.

    Args:
        seconds: how long to wait for a key.
    """

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds
        self.renew()

    def renew(self):
        """Begin anew: `sever` has shut down the connections there were."""
        self._connections = threading.local()
        self.severed = False

    def meet(self, name, rank, ranks, call, seconds):
        """Tell the others what this rank calls, and wait for what they call.

        Returns:
            The ranks that had not come after ``seconds``, and, where all had, their calls by rank.
        """
        return self._ask("meet", name, rank, ranks, call, seconds)

    def set(self, key, value):
        self._ask("set", key, _bytes(value))

    def get(self, key):
        return self._wait([key], None)[0]

    def wait(self, keys, timeout=None):
        self._wait(list(keys), timeout)

    def check(self, keys):
        return self._ask("check", list(keys))[1]

    def add(self, key, amount):
        return self._ask("add", key, amount)[1]

    def compare_set(self, key, expected, desired):
        return self._ask("compare_set", key, _bytes(expected), _bytes(desired))[1]

    def delete_key(self, key):
        return self._ask("delete", key)[1]

    def num_keys(self):
        return self._ask("count")[1]

    def _wait(self, keys, timeout):
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        missing, values = self._ask("get", keys, seconds)
        if missing:
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s for keys {missing}")
        return values

    def _ask(self, *request):
        try:
            connection = self._connection()
            connection.sendall(packed(request))
            received = bytearray()
            while (answer := cut(received)) is None:
                data = connection.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("the notebook closed the connection to its store")
                received += data
        except BaseException as error:
            self._drop()  # an answer may be under way that nobody waits for now
            if self.severed and isinstance(error, OSError):
                raise Severed("the wait for the other ranks was ended") from None
            raise
        return answer

    def _connection(self):
        if self.severed:
            raise Severed("the process group has failed; the next cell has a new one")
        mine = self._connections
        if getattr(mine, "pid", None) != os.getpid():  # this thread's first, or a forked child's
            mine.connection, mine.pid = server.connect("store"), os.getpid()
        return mine.connection

    def _drop(self):
        connection = self._connections.__dict__.pop("connection", None)
        self._connections.pid = None
        if connection is not None:
            connection.close()


def _bytes(value):
    return value.encode() if isinstance(value, str) else bytes(value)
