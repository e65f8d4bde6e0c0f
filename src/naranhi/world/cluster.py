"""Configure ipyparallel for a World: our controller and engines, with every setting explicit."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipyparallel import Cluster
    from ipyparallel.cluster.launcher import EngineLauncher, LocalProcessLauncher

START_SECONDS = 60  # on this machine, where one process imports for all ranks
START_SECONDS_IN_SLURM = 300  # where each rank imports by itself, perhaps from a slow file system
HEARTBEAT_MS = 500
CONTROLLER_ARGS = [
    "--IPController.use_threads=True",
    "--IPController.broadcast_scheduler_depth=0",
    # Only the notebook needs results; the controller would keep a gigabyte of them.
    "--IPController.db_class=NoDB",
    # Only processes that hold the keys of the World's folder can connect, or read the traffic.
    "--IPController.enable_curve=True",
    # The lifeline reports a death. Missed heartbeats only mean that a machine was suspended.
    "--HeartMonitor.max_heartmonitor_misses=1000000000",
]
ENGINE_ARGS = [
    # The lifeline reports a death sooner than one nanny process per rank would.
    "--IPEngine.enable_nanny=False",
    "--IPEngine.max_heartbeat_misses=0",
    "--log-level=30",
]


def make(
    size: int,
    host: str,
    folder: str,
    launcher: type[EngineLauncher],
    controller_cmd: list[str],
    engine_cmd: list[str],
    timeout: float,
) -> Cluster:
    """Return an `ipyparallel.Cluster` that is not yet started.

    Args:
        size: the number of engines.
        host: the address that the controller listens on.
        folder: the folder of its connection files and its output.
        launcher: the class that starts the engines.
        controller_cmd: the command that starts the controller.
        engine_cmd: the command that starts an engine, or with `fork_launcher` all engines.
        timeout: how long an engine waits for the controller, in seconds.
    """
    import ipyparallel
    from traitlets.config import Config

    config = Config()
    config.ControllerLauncher.controller_cmd = controller_cmd
    config.EngineLauncher.engine_cmd = engine_cmd
    # ipyparallel's 5 s are too short for a busy machine.
    config.EngineLauncher.engine_args = [*ENGINE_ARGS, f"--IPEngine.timeout={timeout}"]
    quiet = logging.getLogger("naranhi.ipyparallel")
    quiet.setLevel(logging.CRITICAL)
    return ipyparallel.Cluster(
        n=size,
        config=config,
        parent=None,
        load_profile=False,
        profile_dir=folder,
        cluster_file="",
        engines=launcher,
        controller_ip=host,
        controller_location=host,
        # An engine counts as registered after its first heartbeat.
        controller_args=[*CONTROLLER_ARGS, f"--HeartMonitor.period={HEARTBEAT_MS}"],
        delay=0,
        shutdown_atexit=False,
        log=quiet,
    )


def fork_launcher() -> type[EngineLauncher]:
    """Return ipyparallel's mpiexec launcher, changed to run `fork` without MPI."""
    from ipyparallel.cluster.launcher import MPIEngineSetLauncher

    class ForkEngineSetLauncher(MPIEngineSetLauncher):
        """Launch the engines by `fork` instead of mpiexec."""

        def find_args(self):
            return [*self.engine_cmd, str(self.n), *self.program_args]

    return ForkEngineSetLauncher


def printed(launcher: LocalProcessLauncher) -> str:
    """Return what a launcher's process has printed."""
    try:
        return Path(launcher.output_file).read_text(errors="replace")
    except FileNotFoundError:  # it has ended: ipyparallel has read the file and then removed it
        return launcher.get_output()


class environment:
    """Set environment variables for the processes started inside the block.

    Args:
        values: the variables, None to unset one; their old values are restored at the end of the
            block.
    """

    def __init__(self, values: Mapping[str, str | None]):
        self._values = values

    def __enter__(self) -> None:
        self._before = {k: os.environ.get(k) for k in self._values}
        self._set(self._values)

    def __exit__(self, *raised: object) -> None:
        self._set(self._before)

    @staticmethod
    def _set(values):
        for key, value in values.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
