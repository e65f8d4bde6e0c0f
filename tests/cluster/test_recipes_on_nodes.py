"""A recipe as chapter 17 starts it: by torchrun on two hosts, and by Slurm."""

import os
import pty
import re
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from test_launchers import ROOT, batch

RECIPES = ROOT / "src" / "recipes"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
OPTIONS = ["--steps", "2", "--optimizer", "sgd", "--lr", "0.1"]


def losses(printed):
    return re.findall(r"step \d+: loss ([\d.]+)", printed)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process."""
    done = subprocess.run(
        [sys.executable, RECIPES / "single.py", *OPTIONS],
        cwd=tmp_path_factory.mktemp("alone"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(loss) for loss in losses(done.stdout)]


@pytest.fixture
def hosts(needs):
    """Two network namespaces that a cable joins: [(name, address, device), ...]."""
    needs("ip", "iproute2", as_root=True)
    mark = uuid.uuid4().hex[:6]
    found = [(f"naranhi{mark}{i}", f"10.77.0.{i + 1}", f"v{mark}{i}") for i in range(2)]

    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    try:
        for name, _, _ in found:
            ip("netns", "add", name)
        ip("link", "add", found[0][2], "type", "veth", "peer", "name", found[1][2])
        for name, address, device in found:
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")
        yield found
    finally:
        for name, _, _ in found:
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_two_hosts(hosts, alone, tmp_path):
    first = hosts[0][1]
    started = []
    for node, (name, _, device) in enumerate(hosts):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
        command += [f"--master-addr={first}", "--master-port=29500"]
        command += [RECIPES / "ddp.py", *OPTIONS]
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=ENVIRONMENT | {"GLOO_SOCKET_IFNAME": device},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        printed = [process.communicate(timeout=280) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], printed
    assert [float(loss) for loss in losses(printed[0][0])] == pytest.approx(alone, abs=5e-6)
    assert losses(printed[1][0]) == [], "only rank 0 prints"


def test_slurm(slurm, alone, tmp_path):
    programs = f"{Path(sys.executable).parent}{os.pathsep}{slurm['PATH']}"
    environment = ENVIRONMENT | slurm | {"PATH": programs, "RANKS_PER_NODE": "2"}
    printed = batch(
        environment,
        RECIPES / "slurm.sbatch",
        tmp_path,
        # What this cluster of one node without GPUs has.
        *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gpus-per-node=0"),
        timeout=150,
        program=[RECIPES / "ddp.py", *OPTIONS],
    )
    assert [float(loss) for loss in losses(printed)] == pytest.approx(alone, abs=5e-6), printed


def test_deepspeeds_own_slurm_launcher(slurm, tmp_path):
    """As chapter 18 says: srun starts the script on each rank, and nobody tells it its rank."""
    (tmp_path / "hostfile").write_text(f"{socket.gethostname().split('.')[0]} slots=2\n")
    launcher = [Path(sys.executable).with_name("deepspeed"), "--hostfile=hostfile", "--force_multi"]
    # It asks for ssh, twice, which srun does not use.
    launcher += ["--no_ssh_check", "--master_addr=127.0.0.1", "--launcher=slurm"]
    done = subprocess.run(
        [*launcher, RECIPES / "deepspeed_zero.py", *OPTIONS],
        cwd=tmp_path,
        env=ENVIRONMENT | slurm | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode, done.stdout
    assert "srun -n 2 " in done.stdout + done.stderr
    assert done.stderr.count("ModuleNotFoundError: No module named 'mpi4py'") == 2, done.stderr


TWO_HOSTS = ["unshare", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child"]


@pytest.mark.parametrize("failing", ["0", "1", "none"])
def test_two_hosts_of_which_one_fails(needs, tmp_path, failing):
    """The script ends with both commands, though its stdin is a terminal, and fails if one does."""
    needs("ip", "iproute2", as_root=True)
    command = ["sh", "-c", f'[ "$PET_NODE_RANK" != {failing} ] || exit 7']
    terminal, stdin = pty.openpty()
    try:
        done = subprocess.run(
            [*TWO_HOSTS, "sh", RECIPES / "two_hosts.sh", *command],
            cwd=tmp_path,
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(terminal)
        os.close(stdin)
    assert done.returncode == (0 if failing == "none" else 7), done.stderr
