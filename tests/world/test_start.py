"""Starts that are interrupted, and machines on which ranks cannot start: a sentence, at once."""

import contextlib
import json
import os
import pwd
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import zmq
from kernels import CellError, notebook, processes_of, wait_until

import naranhi
from naranhi.world import controller, fork, server

SAYS = (
    "import naranhi\n"
    "try:\n"
    "    world = naranhi.World(2)\n"
    "    world.execute('print(int(dist.all_reduce(torch.ones(1)) is None))')\n"
    "    world.close()\n"
    "except naranhi.RankError as error:\n"
    "    print(f'RankError: {error}')\n"
)


# What asks the driver; of a process that has, no child can use a GPU.
ASKS = """
import os, torch
from naranhi.world import fork

asked = []


def watch(place, name):
    ask = getattr(place, name)
    setattr(place, name, lambda *args: asked.append(name) or ask(*args))


for name in ("is_available", "device_count"):
    watch(torch.accelerator, name)
    watch(torch.cuda, name)
watch(torch.cuda, "_lazy_init")
os.fork = lambda: print("asked for", *asked, flush=True) or os._exit(0)
fork.main()
"""


def test_no_import_asks_for_a_gpu_before_ranks_are_forked(tmp_path):
    said = subprocess.run(
        [sys.executable, "-c", ASKS, "1"],
        env={**os.environ, server.FOLDER: str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == "asked for\n", said.stdout + said.stderr


def test_the_ports_of_the_controller_are_its_own_before_it_listens():
    """Else a process that asks for any port takes one of them, and the start fails, rarely."""
    with contextlib.closing(naranhi.World(2)) as world:
        printed = Path(world._ranks._cluster.controller.output_file).read_text()
        [file] = Path(world._ranks.folder, "security").glob("*client.json")
        told = json.loads(file.read_text())
        listening = [
            told[name] for name in ("registration", "control", "mux", "iopub", "broadcast")
        ]
        for port in listening:  # on another address nobody listens, and yet it is taken
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.2", port))
    assert "Hub listening" in printed and "Exhausted" not in printed  # of the ports it was given
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(one) for one in controller.reserve(300)]
        ports = {one.getsockname()[1] for one in held}
        for _ in range(500):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", 0))
                assert other.getsockname()[1] not in ports
        with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
            listener.bind(f"tcp://127.0.0.1:{min(ports)}")


def test_an_interrupted_start_leaves_nothing_and_the_next_works():
    """Interrupted half-way through the import of torch; at once; with all processes there."""
    with notebook() as opened:

        def half_imported():
            return "libtorch_python" in Path(f"/proc/{opened.pid}/maps").read_text()

        def all_there():
            return len(processes_of(opened.pid)) >= 4

        for moment in (half_imported, None, all_there):
            request = opened.begin(
                "import naranhi.world\nprint('begun', flush=True)\nworld = naranhi.World(2)"
            )
            opened.wait_for_output(request)
            if moment is not None:
                wait_until(moment, 60)
            opened.interrupt()
            with pytest.raises(CellError, match="KeyboardInterrupt"):
                opened.finish(request)
            assert opened.run("import torch\nprint(torch.ones(1).item())") == "1.0\n"
            wait_until(lambda: not processes_of(opened.pid), 10)
        opened.run("world = naranhi.World(2)")
        assert opened.run("%%ranks\nprint('on')") == "[ranks 0-1] on\n"


def test_an_interrupted_restart_is_made_up_for_by_the_next_cell():
    with notebook() as opened:
        opened.run("import naranhi\nworld = naranhi.World(2)")
        with pytest.raises(CellError, match="rank 1 died"):
            opened.run("%%ranks\nimport os\nif rank == 1:\n    os._exit(1)\ndist.barrier()")
        before = processes_of(opened.pid)
        request = opened.begin("%%ranks\nprint('on')")
        wait_until(lambda: {*processes_of(opened.pid)} - {*before}, 60)
        opened.interrupt()
        with pytest.raises(CellError, match="KeyboardInterrupt"):
            opened.finish(request)
        assert opened.run("%%ranks\nprint('on')").splitlines() == [
            "ranks 0-1 restarted; the variables of earlier cells are lost",
            "[ranks 0-1] on",
        ]


def started(program=SAYS, timeout=180, **options):
    """What a Python program prints, and its seconds."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout, **options
    )
    assert done.stderr == ""
    return done.stdout, time.monotonic() - start


def few_files(hard):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))

    return limit


def test_too_few_open_files():
    said, seconds = started(preexec_fn=few_files(64))
    assert "RankError: 2 ranks need 192 open files a process, and the limit is 64" in said
    assert "ulimit -n 1024" in said
    assert seconds < 20


def test_a_limit_of_open_files_that_may_be_raised_is():
    said, _ = started(preexec_fn=few_files(512))
    assert said == "[ranks 0-1] 1\n"


def test_a_current_folder_that_was_removed(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    said, seconds = started(f"import os\nos.rmdir({str(folder)!r})\n" + SAYS, cwd=folder)
    assert said.startswith("RankError: the current folder of this notebook has been removed")
    assert seconds < 20


@pytest.fixture
def own_mounts(needs):
    """Runs a program where this shell line has changed what is mounted."""
    needs("unshare", "util-linux", as_root=True)

    def run(setup, program=SAYS, **environment):
        line = f'{setup} && exec "$0" -c "$1"'
        start = time.monotonic()
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", line, sys.executable, program],
            capture_output=True,
            text=True,
            timeout=90,
            env={**os.environ, **environment},
        )
        return done.stdout, done.stderr, time.monotonic() - start

    return run


READ_ONLY = (
    "for folder in /tmp /var/tmp; do mount --bind $folder $folder && "
    "mount -o remount,ro,bind $folder; done; cd /proc"
)


def test_no_folder_for_temporary_files(own_mounts):
    said, stderr, seconds = own_mounts(READ_ONLY)
    assert "RankError: the ranks need a folder for temporary files, and none can be made" in said
    assert "set TMPDIR to a folder that can be written" in said
    assert "Traceback" not in stderr
    assert seconds < 20


def test_a_full_disk(own_mounts, tmp_path):
    setup = f"mount -t tmpfs -o size=64k none {tmp_path}"
    said, stderr, seconds = own_mounts(setup, TMPDIR=str(tmp_path))
    assert f"RankError: the ranks need 2 MiB for temporary files, and {tmp_path} has 64" in said
    assert "Traceback" not in stderr
    assert seconds < 20


def test_a_disk_that_fills_up(own_mounts, tmp_path):
    fills = SAYS.replace("print(int", "print(chr(120) * (8 << 20), int")
    setup = f"mount -t tmpfs -o size=6M none {tmp_path}"
    said, stderr, _ = own_mounts(setup, fills, TMPDIR=str(tmp_path))
    assert "RankError: ranks 0-1 raised OSError: [Errno 28] No space left" in said, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("home", ["missing", "read-only"])
def test_a_home_that_cannot_be_written_leaves_no_folders(own_mounts, tmp_path, home, monkeypatch):
    monkeypatch.delenv(fork.CACHE, raising=False)  # which torch, imported here, may have set
    folder = tmp_path / "home"
    folder.mkdir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    setup = f"mount -t tmpfs -o ro none {folder}" if home == "read-only" else f"rmdir {folder}"
    said, stderr, _ = own_mounts(setup, HOME=str(folder), TMPDIR=str(temporary))
    assert said == "[ranks 0-1] 1\n", stderr
    assert list(temporary.iterdir()) == []


def test_another_user_without_a_home(needs):
    """One who may read everything, so that it does not matter where Python is, and write little."""
    needs("setpriv", "util-linux", as_root=True)
    user = pwd.getpwnam("nobody")
    may = "+dac_read_search"
    who = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    who += [f"--inh-caps={may}", f"--ambient-caps={may}"]
    with tempfile.TemporaryDirectory() as folder:  # not in one of root's alone
        os.chown(folder, user.pw_uid, user.pw_gid)
        environment = {k: v for k, v in os.environ.items() if k != fork.CACHE}
        done = subprocess.run(
            ["setpriv", *who, sys.executable, "-c", SAYS],
            capture_output=True,
            text=True,
            timeout=90,
            cwd="/",
            env=environment | {"HOME": "/nonexistent", "TMPDIR": folder},
        )
        assert done.stdout == "[ranks 0-1] 1\n", done.stderr
        assert os.listdir(folder) == []
