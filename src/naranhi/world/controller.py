"""Run ipyparallel's controller with a lifeline to its notebook."""

from __future__ import annotations

import os
import secrets

from naranhi.distributed import processes
from naranhi.world import leftovers, lifeline, server


def main() -> None:
    """Become the controller. Called once, in a process of its own."""
    folder = os.environ[server.FOLDER]
    lifeline.hold({}, on_end=lambda lost: leftovers.tidy_up(folder) if lost else None)
    own = os.getpid()  # one of ipyparallel's schedulers is a process that would outlive this one
    os.register_at_fork(after_in_child=lambda: processes.die_with_parent(own))
    from ipyparallel.controller.app import IPController
    from traitlets.config import Config

    config = Config()
    config.Session.key = secrets.token_hex(32).encode()  # besides CURVE; otherwise all warn
    IPController.launch_instance(config=config)


if __name__ == "__main__":
    main()
