"""Run ipyparallel's controller with a lifeline to its notebook."""

from __future__ import annotations

import os
import secrets
import socket

from naranhi.distributed import processes
from naranhi.world import leftovers, lifeline, server

PORTS = 15  # needed by ipyparallel's controller with one broadcast scheduler


def reserve(number: int) -> list[socket.socket]:
    """Return sockets that hold free ports for listeners of this process.

    ipyparallel asks the kernel for free ports and binds them later; another process can take one
    in between. While a socket is bound, the kernel does not assign its port to other processes; a
    listener that asks for this port can still bind it, because both sockets set SO_REUSEADDR.
    """
    held = [socket.socket() for _ in range(number)]
    for one in held:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("", 0))
    return held


def main() -> None:
    """Become the controller. Called once, in a process of its own."""
    folder = os.environ[server.FOLDER]
    lifeline.hold({}, on_end=lambda lost: leftovers.tidy_up(folder) if lost else None)
    own = os.getpid()  # one of ipyparallel's schedulers is a process that would outlive this one
    os.register_at_fork(after_in_child=lambda: processes.die_with_parent(own))
    from ipyparallel.controller.app import IPController
    from traitlets.config import Config

    config = Config()
    config.Session.key = secrets.token_hex(32).encode()  # without a key every process warns
    held = reserve(PORTS)  # until this process ends
    config.IPController.ports = [one.getsockname()[1] for one in held]
    IPController.launch_instance(config=config)


if __name__ == "__main__":
    main()
