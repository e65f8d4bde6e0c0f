"""Access, from a rank, the keys that the ranks of a World share (see `keys`)."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import torch.distributed as dist

from naranhi.world import server
from naranhi.world.keys import cut, packed

if TYPE_CHECKING:
    import datetime


class Severed(RuntimeError):
    """The notebook ended the wait because another rank has failed."""


class Store(dist.Store):
    """Connect a rank to the keys: a store for `init_process_group`, and `meet`.

    Each thread has its own connection, so a thread that waits does not block another.

    Args:
        seconds: how long to wait for a key.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Start with new connections, because `sever` has shut down the old ones."""
        self._connections = threading.local()
        self.severed = False

    def meet(
        self, name: str, rank: int, ranks: list[int], call: str, seconds: float
    ) -> tuple[list[int], dict[int, str]]:
        """Send this rank's call to the other ranks, and wait for theirs.

        Args:
            name: the name of the meeting, the same on all its ranks.
            rank: this rank.
            ranks: all ranks that take part.
            call: what this rank calls.
            seconds: how long to wait.

        Returns:
            The ranks that had not come after `seconds`, and the calls of those that had, by rank.
        """
        return self._ask("meet", name, rank, ranks, call, seconds)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value.

        Raises:
            DistStoreError: the key was not set in time.
        """
        return self._wait([key], None)[0]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are set.

        Args:
            keys: the keys.
            timeout: how long to wait; default: the store's `seconds`.

        Raises:
            DistStoreError: a key was not set in time.
        """
        self._wait(list(keys), timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return self._ask("check", list(keys))[1]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, 0 if it is not set; return the sum."""
        return self._ask("add", key, amount)[1]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is `expected`; return its value, or `expected` if it is not set.

        An unset key counts as an empty value.
        """
        return self._ask("compare_set", key, _bytes(expected), _bytes(desired))[1]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        return self._ask("delete", key)[1]

    def num_keys(self) -> int:
        """Return the number of keys."""
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
                    raise ConnectionResetError(
                        f"the notebook's store failed on this {request[0]}, or the notebook ended"
                    )
                received += data
        except BaseException as error:
            self._drop()  # an answer that nobody waits for may still be in flight
            if self.severed and isinstance(error, OSError):
                raise Severed("the wait for the other ranks was ended") from None
            raise
        return answer

    def _connection(self):
        if self.severed:
            raise Severed("the process group has failed; the next cell has a new one")
        connections = self._connections
        # The first request of this thread, or of a forked child.
        if getattr(connections, "pid", None) != os.getpid():
            connections.connection, connections.pid = server.connect("store"), os.getpid()
        return connections.connection

    def _drop(self):
        connection = self._connections.__dict__.pop("connection", None)
        self._connections.pid = None
        if connection is not None:
            connection.close()


def _bytes(value):
    return value.encode() if isinstance(value, str) else bytes(value)
