"""What differs inside a Slurm allocation: ranks are started by srun, also on other nodes."""

import os
import shutil
import socket
import subprocess


def is_here():
    """Whether this process runs in an allocation that can start tasks."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def several_nodes():
    return is_here() and int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) > 1


def own_address():
    """The address by which the other nodes of the allocation reach this one."""
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    command = ["scontrol", "show", "node", name, "--oneliner"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    fields = dict(field.split("=", 1) for field in shown.split() if "=" in field)
    return socket.gethostbyname(fields.get("NodeAddr", name))


def srun_launcher():
    """ipyparallel's launcher by mpiexec, with srun in its place and without MPI."""
    from ipyparallel.cluster.launcher import MPIEngineSetLauncher

    class SrunEngineSetLauncher(MPIEngineSetLauncher):
        @property
        def program(self):
            return self.engine_cmd

        def find_args(self):
            # The ranks share the allocation's cores with the notebook's own step, and one another.
            command = ["srun", "--overlap", "--overcommit", "--kill-on-bad-exit=0"]
            return [*command, f"--ntasks={self.n}", *self.program, *self.program_args]

    return SrunEngineSetLauncher


def kill_step(step):
    """Have Slurm kill the tasks of a step, which reaches those that obey nothing."""
    command = ["scancel", "--signal=KILL", f"{os.environ['SLURM_JOB_ID']}.{step}"]
    subprocess.run(command, capture_output=True, timeout=30)
