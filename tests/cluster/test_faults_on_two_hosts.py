"""The faults that need a network or a disk of their own: each in namespaces that end with it."""

import os
import re
import signal
import subprocess
from itertools import pairwise

import pytest
from faulty_runs import RECIPES, THREE, TORCHRUN, Run, wait_for

DEADLINE = 10
UNSHARE = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
HOSTS = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=10.77.0.1", "--master-port=29500"]


def namespaces_and_mounts():
    with open("/proc/self/mounts") as mounts:
        names = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
        return sorted(names), mounts.read()


@pytest.fixture
def nothing_left():
    before = namespaces_and_mounts()
    yield
    assert namespaces_and_mounts() == before


def test_a_link_that_goes_down(needs, nothing_left, tmp_path):
    """For five seconds it costs a slow step; for sixty, the deadline of ten ends the run."""
    needs("ip", "iproute2", as_root=True)
    two_hosts = [*UNSHARE, "--net", "sh", RECIPES / "two_hosts.sh"]
    script = ["--redirects=3", RECIPES / "faults.py", "slow-rank", f"--deadline={DEADLINE}"]
    command = [*two_hosts, *TORCHRUN, *HOSTS, *script]
    with Run(tmp_path, *command, stdin=subprocess.PIPE) as run:

        def host(number):
            file = next(tmp_path.glob(f"host{number}/*/attempt_0/0/stdout.log"), None)
            return file.read_text() if file else ""

        def cut(seconds):
            run.process.stdin.write(f"{seconds}\n".encode())
            run.process.stdin.flush()

        wait_for(lambda: host(0).count("step") > 10, run)
        cut(5)
        before = host(0).count("step")
        wait_for(lambda: host(0).count("step") > before + 10, run)
        cut(60)
        wait_for(lambda: all("RuntimeError" in host(number) for number in (0, 1)), run, 40)
        run.process.kill()
        assert run.process.wait() == -signal.SIGKILL
        assert run.left() == []

    ends = [float(line.split()[-1]) for line in re.findall("step .*", host(0))]
    longest = max(after - before for before, after in pairwise(ends))
    assert 4 < longest < DEADLINE
    assert "Timed out waiting 10000ms" in host(0) + host(1)
    flags = re.findall("host (.): <(.*)>", run.printed())[:2]
    up = {host: {"UP", "NO-CARRIER"} & set(words.split(",")) for host, words in flags}
    assert up == {"0": {"UP", "NO-CARRIER"}, "1": set()}


def test_a_full_disk(needs, nothing_left, tmp_path):
    """A file system of one MiB, mounted in a namespace; the checkpoint has four."""
    needs("unshare", "util-linux", as_root=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'cd {disk} && mount -t tmpfs -o size=1m none . && cd {disk} && exec "$@"'
    script = ["--redirects=3", f"--log-dir={tmp_path}/logs", RECIPES / "faults.py", "full-disk"]
    command = [*UNSHARE, "sh", "-c", mount, "sh", *TORCHRUN, *THREE, *script]
    with Run(tmp_path, *command, GLOO_SOCKET_IFNAME="lo") as run:
        assert run.end(60) == 1
        assert run.left() == []
        assert re.search(r"RuntimeError: .*unexpected pos \d+ vs \d+", run.said("full-disk")[1])
    assert list(disk.iterdir()) == [], "what was written was on the disk of the namespace"
