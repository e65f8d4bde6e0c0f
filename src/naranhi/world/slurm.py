"""Handle what differs inside a Slurm allocation: srun starts the ranks, also on other nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipyparallel.cluster.launcher import EngineLauncher


def is_here() -> bool:
    """Return whether this process runs in an allocation that can start tasks."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def several_nodes() -> bool:
    """Return whether the allocation has more than one node."""
    return is_here() and int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) > 1


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
            return [*command, f"--ntasks={self.n}", *self.program, *self.program_args]

    return SrunEngineSetLauncher


def kill_step(step: str) -> None:
    """Make Slurm kill the tasks of a step, including tasks that obey no command."""
    command = ["scancel", "--signal=KILL", f"{os.environ['SLURM_JOB_ID']}.{step}"]
    subprocess.run(command, capture_output=True, timeout=30)
