"""The same kernels under torchrun, under srun, and under a World inside an allocation."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXPECTED = [f"rank {rank} of 4: 10" for rank in range(4)]


def run(command, timeout=120, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_torchrun():
    # --standalone would look up this machine's name; one machine needs nothing but loopback.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr=127.0.0.1"]
    printed = run([*launcher, *meeting, HERE / "program.py"], env=environment)
    assert sorted(printed.splitlines()) == EXPECTED


def test_srun(slurm, tmp_path):
    command = ["srun", "-n4", "--overcommit", sys.executable, HERE / "program.py"]
    printed = run(command, env=slurm, cwd=tmp_path)
    assert sorted(printed.splitlines()) == EXPECTED
    assert list(tmp_path.iterdir()) == []


def test_neither_launcher():
    done = subprocess.run(
        [sys.executable, HERE / "program.py"], capture_output=True, text=True, timeout=60
    )
    assert "started by neither torchrun nor srun" in done.stderr
    assert done.returncode != 0


def batch(slurm, script, folder, *options, timeout=280, program=(), tasks=("-n4", "--overcommit")):
    """Submit a script (with arguments), wait for its end, return what it printed."""
    output = folder / "output"
    command = ["sbatch", "--parsable", f"--chdir={folder}", f"--output={output}"]
    job = run([*command, *tasks, *options, script, *program], env=slurm).strip()
    end = time.monotonic() + timeout
    # (sbatch --wait would look only every half minute)
    while run(["squeue", "--noheader", f"--jobs={job}", "--states=PD,R,CG"], env=slurm).strip():
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.3)
    return output.read_text()


PROGRAM = """#!{python}
import os
import naranhi
world = naranhi.World(4)
world.execute("x = torch.ones(1); dist.all_reduce(x); print(x.item())")
world.execute("import os; print(os.environ['SLURM_STEP_ID'] != 'extern', rank)")
tasks = world.run(lambda: int(os.environ["SLURM_PROCID"]))
print(tasks)
{then}
"""


def test_a_world_inside_an_allocation(slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(python=sys.executable, then="world.close()"))
    printed = batch(slurm, script, tmp_path)
    assert printed.splitlines() == [
        "[ranks 0-3] 4.0",
        *(f"[rank {rank}] True {rank}" for rank in range(4)),
        "[0, 1, 2, 3]",
    ]


@pytest.mark.parametrize("end", ["world.close()", "os.kill(os.getpid(), 9)"])
def test_no_process_outlives_the_notebook_of_an_allocation(slurm, tmp_path, end):
    script = tmp_path / "script.py"
    then = f"print(os.getpid(), flush=True)\n{end}"
    script.write_text(PROGRAM.format(python=sys.executable, then=then))
    printed = batch(slurm, script, tmp_path)
    assert "[0, 1, 2, 3]" in printed, printed
    wait_until_no_ranks()


def wait_until_no_ranks(seconds=10):
    deadline = time.monotonic() + seconds
    while left := ranks():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def ranks():
    """Processes of a World that Slurm started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if b"naranhi.world" in command and b"SLURM_JOB_ID" in environment:
                found.append(int(entry.name))
    return found
