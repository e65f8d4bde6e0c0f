"""Handle what differs inside a Slurm allocation: srun starts the ranks, also on other nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipyparallel.cluster.launcher import EngineLauncher


# The allocation's GPU settings for its tasks. `srun` would apply them to the ranks too, and with
# several GPUs per task two ranks would get the same GPUs.
OF_OTHER_TASKS = (
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK",
)


def is_here() -> bool:
    """Return whether this process runs in an allocation that can start tasks."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def on_other_hosts() -> bool:
    """Return whether ranks of the allocation may be on another host than this process.

    The shell of `salloc` is on none of the nodes, unless the cluster is configured otherwise.
    """
    several = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) > 1
    return is_here() and (several or "SLURMD_NODENAME" not in os.environ)


def srun_launcher() -> type[EngineLauncher]:
    """Return ipyparallel's mpiexec launcher, changed to run srun without MPI."""
    from ipyparallel.cluster.launcher import MPIEngineSetLauncher

    class SrunEngineSetLauncher(MPIEngineSetLauncher):
        @property
        def program(self):
            return self.engine_cmd

        def find_args(self):
            # The ranks share the allocation's cores with the notebook's own step and each other.
            command = ["srun", "--overlap", "--overcommit", "--kill-on-bad-exit=0"]
            # Override what the site, or the `srun` that started the notebook, set: each rank has
            # the notebook's environment and all cores of its node; a node's ranks are consecutive.
            command += ["--export=ALL", "--cpu-bind=none", "--distribution=block"]
            return [*command, f"--ntasks={self.n}", *self.program, *self.program_args]

    return SrunEngineSetLauncher


def kill_step(step: str) -> None:
    """Make Slurm kill the tasks of a step, including tasks that obey no command."""
    command = ["scancel", "--signal=KILL", f"{os.environ['SLURM_JOB_ID']}.{step}"]
    # If scancel fails, Slurm ends the tasks with the allocation.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=30)
