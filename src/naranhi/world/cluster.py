"""ipyparallel as a World uses it: a controller and engines of ours, with nothing left to chance."""

import logging
import os

HEARTBEAT_MS = 500
CONTROLLER_ARGS = [
    "--IPController.use_threads=True",
    "--IPController.broadcast_scheduler_depth=0",
    # Results are the notebook's; the controller would keep a gigabyte of them.
    "--IPController.db_class=NoDB",
    # Nobody without the keys of the World's folder can connect, or read what is sent.
    "--IPController.enable_curve=True",
    # A lifeline tells of a death. Missed heartbeats tell of a machine that was suspended.
    "--HeartMonitor.max_heartmonitor_misses=1000000000",
]
ENGINE_ARGS = [
    # The lifeline tells of a death sooner than a nanny process beside every rank would.
    "--IPEngine.enable_nanny=False",
    "--IPEngine.max_heartbeat_misses=0",
    "--log-level=30",
]


def make(size, host, folder, launcher, controller_cmd, engine_cmd):
    """An ipyparallel.Cluster, not yet started.

    Args:
        size: how many engines.
        host: the address that the controller listens on.
        folder: where its connection files and its output are.
        launcher: the class that starts the engines.
        controller_cmd, engine_cmd: what is started.
    """
    import ipyparallel
    from traitlets.config import Config

    config = Config()
    config.ControllerLauncher.controller_cmd = controller_cmd
    config.EngineLauncher.engine_cmd = engine_cmd
    config.EngineLauncher.engine_args = ENGINE_ARGS
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
        # An engine counts as registered when its heart has beaten once.
        controller_args=[*CONTROLLER_ARGS, f"--HeartMonitor.period={HEARTBEAT_MS}"],
        delay=0,
        shutdown_atexit=False,
        log=quiet,
    )


def fork_launcher():
    from ipyparallel.cluster.launcher import MPIEngineSetLauncher

    class ForkEngineSetLauncher(MPIEngineSetLauncher):
        """ipyparallel's launcher by mpiexec, with `fork` in its place and without MPI."""

        def find_args(self):
            return [*self.engine_cmd, str(self.n), *self.program_args]

    return ForkEngineSetLauncher


class environment:
    """Environment variables for the processes started inside the block."""

    def __init__(self, values):
        self._values = values

    def __enter__(self):
        self._before = {k: os.environ.get(k) for k in self._values}
        os.environ.update(self._values)

    def __exit__(self, *raised):
        for key, value in self._before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
