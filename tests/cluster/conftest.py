"""Real Slurm clusters of one and two nodes, set up for these tests and taken down after them."""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import host_network
import pytest

CONFIGURATION = """
ClusterName=naranhi
SlurmctldHost={host}({address})
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/affinity
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs={cores}"


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _munge(folder):
    """A munged of our own: its key and its socket are in the folder."""
    user = pwd.getpwnam("munge")
    home = folder / "munge"
    home.mkdir()
    (home / "key").write_bytes(secrets.token_bytes(128))
    for path, mode in ((home / "key", 0o400), (home, 0o755)):
        os.chown(path, user.pw_uid, user.pw_gid)
        path.chmod(mode)
    files = ("socket", "pid", "log", "seed")
    options = [f"--{name}-file={home}/{name}" for name in files if name != "socket"]
    command = ["munged", "--foreground", "--force", f"--key-file={home}/key", *options]
    command.append(f"--socket={home}/socket")
    return subprocess.Popen(
        command, user=user.pw_uid, group=user.pw_gid, extra_groups=[], start_new_session=True
    )


@pytest.fixture(scope="session")
def slurm(needs):
    """The environment in which srun and sbatch find a cluster of one node, this host."""
    name = socket.gethostname().split(".")[0]
    with _cluster(needs, {name: ("127.0.0.1", [])}) as environment:
        yield environment


@pytest.fixture
def two_nodes(needs, tmp_path_factory):
    """The environment of a cluster of two nodes: this host, and a network namespace beside it.

    Each has temporary files of its own, as nodes do.
    """
    needs("ip", "iproute2", as_root=True)
    own, mark = tmp_path_factory.mktemp("own"), uuid.uuid4().hex[:6]
    name, device = f"naranhi{mark}", f"v{mark}"  # which is called so at both ends

    def ip(*words):
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", name)
    try:
        with host_network.changing():
            ip("link", "add", device, "type", "veth", "peer", "name", device, "netns", name)
            ip("link", "set", device, "addrgenmode", "none")  # or IPv6 adds an address later
            for number, where in enumerate(([], ["-n", name]), 1):
                ip(*where, "addr", "add", f"10.78.0.{number}/24", "dev", device)
                ip(*where, "link", "set", device, "up")
        ip("-n", name, "link", "set", "lo", "up")
        enter = ["nsenter", f"--net=/run/netns/{name}"]  # ip would hide the cgroups
        enter += ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs own {own} && exec "$0" "$@"']
        nodes = {"node1": ("10.78.0.1", []), "node2": ("10.78.0.2", enter)}
        with _cluster(needs, nodes) as environment:
            yield environment | {"TMPDIR": str(own)}
    finally:
        # The namespace lasts as long as a process in it; the cable must not last as long.
        with host_network.changing():
            subprocess.run(["ip", "link", "del", device], check=False)
        ip("netns", "del", name)


@contextlib.contextmanager
def _cluster(needs, wanted):
    """wanted: {node: (its address, what a command that is to run there begins with)}."""
    for program, package in (("slurmctld", "slurm-wlm"), ("slurmd", "slurm-wlm")):
        needs(program, package, as_root=True)
    needs("munged", "munge", as_root=True)
    folder = Path(tempfile.mkdtemp(prefix="naranhi-slurm-"))
    folder.chmod(0o755)  # munge's user must reach its socket
    (folder / "state").mkdir()
    host = socket.gethostname().split(".")[0]
    cores = max(4, os.cpu_count())  # as many as a job for four ranks asks for
    nodes = [
        NODE.format(name=name, host=host, address=address, port=_free_port(), cores=cores)
        for name, (address, _) in wanted.items()
    ]
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=host,
            address=next(iter(wanted.values()))[0],
            folder=folder,
            ctld_port=_free_port(),
            nodes="\n".join(nodes),
        )
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    environment["SLURM_CONF"] = str(configuration)
    daemons = [_munge(folder)]
    try:
        slurmds = [[*enter, "slurmd", "-D", "-N", name] for name, (_, enter) in wanted.items()]
        for command in (["slurmctld", "-D", "-i"], *slurmds):
            daemons.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        _wait_until_idle(environment, folder)
        yield environment
    finally:
        if shutil.which("scancel"):
            subprocess.run(["scancel", "--user=root"], env=environment, check=False, timeout=30)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
        _kill_step_daemons(configuration)
        shutil.rmtree(folder)


def _kill_step_daemons(configuration):
    """Kill those of a cluster, which would go on reporting to daemons that are gone."""
    mark = f"SLURM_CONF={configuration}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            is_one = (entry / "comm").read_text() == "slurmstepd\n"
            if is_one and mark in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def _wait_until_idle(environment, folder, seconds=60):
    end = time.monotonic() + seconds
    state = None
    while state != {"idle"}:
        if time.monotonic() > end:
            logs = "".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
            raise TimeoutError(f"the nodes are {state} after {seconds} s\n{logs}")
        time.sleep(0.3)
        asked = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        state = set(asked.stdout.split())
