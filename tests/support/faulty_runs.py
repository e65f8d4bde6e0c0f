"""Runs of `faults.py` under torchrun: what each rank said, and whether a process is left."""

import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

RECIPES = Path(__file__).parents[2] / "src" / "recipes"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
THREE = ["--standalone", "--nproc-per-node=3"]
SCRIPT = ["--redirects=3", "--log-dir=logs", "--monitor-interval=0.02", RECIPES / "faults.py"]
START = 240.0  # seconds: a busy machine takes its time over new processes


class Run:
    """A started command. Its processes carry a mark, by which `left` finds them."""

    def __init__(self, folder, *command, stdin=None, **environment):
        self.folder, self.mark = folder, uuid.uuid4().hex
        marked = {"FAULTS_MARK": self.mark, "OMP_NUM_THREADS": "1", **environment}
        with open(folder / "printed", "w") as printed:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | marked,
                stdin=stdin,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in [self.process, *self.left(0.0)]:
            process.kill()
        self.process.wait()

    def end(self, seconds):
        """The exit code, of a run whose faults take no longer than `seconds`."""
        return self.process.wait(START + seconds)

    def printed(self):
        return (self.folder / "printed").read_text()

    def said(self, fault, log="logs"):
        """{rank: what it has written during a fault}."""
        files = sorted(self.folder.glob(f"{log}/*/attempt_0/*/stdout.log"))
        texts = {int(file.parent.name): file.read_text() for file in files}
        assert texts, self.printed()
        return {
            rank: text.partition(f"== {fault}\n")[2].partition("\n== ")[0]
            for rank, text in texts.items()
        }

    def exit_codes(self):
        """{rank: exit code}, of the ranks that torchrun lists as failed."""
        listed = re.findall(r"rank +: (\d+).*\n +exitcode +: (-?\d+)", self.printed())
        return {int(rank): int(code) for rank, code in listed}

    def states(self):
        """{rank: the state of its process}."""
        states = {}
        for process in psutil.Process(self.process.pid).children():
            try:
                states[int(process.environ()["RANK"])] = process.status()
            except (psutil.NoSuchProcess, psutil.ZombieProcess, KeyError):
                continue  # it has just ended, or is not a rank yet
        return states

    def left(self, seconds=10.0):
        """The processes of the run that are still there after so many seconds."""
        end = time.monotonic() + seconds
        while (processes := self._processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return processes

    def _processes(self):
        processes = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FAULTS_MARK") == self.mark:
                    processes.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return processes


def wait_for(condition, run, seconds=START):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, run.printed()
        assert run.process.poll() is None, run.printed()
        time.sleep(0.02)
