"""Other users of this machine, and whoever finds a port: nobody gets in, or holds up anybody."""

import contextlib
import ctypes
import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import naranhi
from naranhi.world import World, leftovers, server
from naranhi.world.lifeline import SEVER, Lifelines
from naranhi.world.store import Store


@pytest.fixture(scope="module")
def world():
    world = World(2, timeout=8.0)
    yield world
    world.close()


@pytest.fixture(autouse=True)
def next_cell_works(world, capsys):
    yield
    world.execute("x = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())")
    assert capsys.readouterr().out.splitlines()[-1] == "[ranks 0-1] 2.0"


def ports_of(*pids):
    """The ports of this machine that processes listen on."""
    shown = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.splitlines() if any(f"pid={pid}," in line for pid in pids)]
    return [int(line.split()[3].rpartition(":")[2]) for line in lines]


def test_the_store_of_the_ranks_lets_in_nobody_without_the_secret(world, monkeypatch):
    ports = ports_of(os.getpid())
    assert ports
    for port in ports:
        with pytest.raises((dist.DistStoreError, dist.DistNetworkError)):
            stranger = dist.TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=1))
            stranger.set("checks/0/1/0", '"barrier"')
        for secret in ("", "0" * 32):  # of one who speaks as our own do
            monkeypatch.setenv(server.ADDRESS, f"127.0.0.1:{port}:{secret}")
            with pytest.raises(ConnectionError):
                Store(1.0).set("checks/0/1/0", "barrier")


def test_the_controller_lets_in_nobody_without_its_key(world):
    zmq = pytest.importorskip("zmq")
    controller = world._ranks._cluster.controller.pid
    with zmq.Context() as context:
        for port in ports_of(controller):
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                events = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                stranger.connect(f"tcp://127.0.0.1:{port}")
                assert not events.poll(300), f"port {port} of the controller let in a stranger"


def test_a_first_line_without_end_is_cut_off(world, monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 600.0)  # not because it has taken too long
    for port in ports_of(os.getpid()):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as stranger,
            pytest.raises((ConnectionResetError, BrokenPipeError)),
        ):
            for _ in range(64):
                stranger.sendall(b"x" * (1 << 20))


def test_silent_and_slow_strangers_delay_nobody(world):
    with contextlib.ExitStack() as stack:
        for port in ports_of(os.getpid()):
            for _ in range(8):
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(b"{")  # and no more
        start = time.monotonic()
        with pytest.raises(naranhi.RankError, match=r"rank 1 died \(killed by SIGKILL\)") as died:
            world.execute(
                "import os, signal\n"
                "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
                "import time\ntime.sleep(600)"
            )
        assert time.monotonic() - start < 12
        assert died.value.rank == 1


def test_a_stranger_that_sends_slowly_is_closed_in_time(world):
    for port in ports_of(os.getpid()):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
            start = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - start < 15:
                    stranger.sendall(b"{")
                    time.sleep(0.2)  # this is how slow it is
            assert time.monotonic() - start < 10


PROCESS = """
from naranhi.world import server

connections = [server.connect("lifeline", host="here", pid=p, namespace="") for p in range(8)]
print([connection.recv(1) for connection in connections])
"""


def test_a_busy_interpreter_takes_nobody_for_a_stranger(monkeypatch):
    """Loading a library keeps the interpreter's lock, on a slow disk for seconds. What came
    meanwhile came in time."""
    monkeypatch.setattr(server, "HELLO_SECONDS", 0.1)
    lifelines, over = Lifelines(), threading.Event()
    own = server.Server("127.0.0.1", lifeline=lifelines)
    keep = ctypes.PyDLL(None).usleep  # a PyDLL does not release the lock

    def load():
        while not over.is_set():
            keep(150_000)

    environment = os.environ | {server.ADDRESS: own.address}
    with subprocess.Popen([sys.executable, "-c", PROCESS], env=environment):
        busy = threading.Thread(target=load)
        busy.start()
        end = time.monotonic() + 20
        while not (known := all(lifelines.alive(("here", pid)) for pid in range(8))):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        over.set()
        busy.join()
        own.close()
    assert known, "each was connected, and its first line had been sent"


def test_what_no_parser_reads_is_a_strangers():
    """Brackets nested deeper than Python recurses."""
    with serving() as (own, lifelines):
        connect_to(own).sendall(b"[" * 1023 + b"\n")
        assert reached(own, lifelines)


def test_a_stranger_that_is_closed_may_have_spoken(monkeypatch):
    """It was found ready to read together with the one for which it was closed."""
    monkeypatch.setattr(server, "STRANGERS", 1)
    waiting, over = threading.Event(), threading.Event()

    class Slow:
        """Stands for whatever keeps the server's thread from the interpreter."""

        def tick(self):
            if waiting.is_set():
                over.wait(20)

    with serving(slow=Slow()) as (own, lifelines):
        first = connect_to(own)
        time.sleep(0.5)
        waiting.set()
        time.sleep(0.5)
        second = connect_to(own)
        time.sleep(0.2)
        first.sendall(b"x")
        time.sleep(0.2)
        waiting.clear()
        over.set()
        time.sleep(1.0)
        monkeypatch.undo()
        assert reached(own, lifelines)
        second.close()


@contextlib.contextmanager
def serving(**services):
    lifelines = Lifelines()
    own = server.Server("127.0.0.1", lifeline=lifelines, **services)
    yield own, lifelines
    own.close()


def connect_to(own):
    return socket.create_connection(("127.0.0.1", int(own.address.split(":")[1])), timeout=20)


def reached(own, lifelines):
    """Whether the server still lets in a process of ours."""
    environment = os.environ | {server.ADDRESS: own.address}
    with subprocess.Popen([sys.executable, "-c", PROCESS], env=environment):
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if all(lifelines.alive(("here", pid)) for pid in range(8)):
                own.close()
                return True
            time.sleep(0.05)
        own.forget()
    return False


DEAF = """
import time
from naranhi.world import lifeline

def sever():
    raise OSError("no descriptor is left")

lifeline.hold({lifeline.SEVER: sever})
time.sleep(60)
"""


def test_a_process_that_cannot_obey_says_nothing_and_still_ends():
    with serving() as (own, lifelines):
        environment = os.environ | {server.ADDRESS: own.address}
        command = [sys.executable, "-c", DEAF]
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            try:
                who = (socket.gethostname(), process.pid)
                end = time.monotonic() + 20
                while not lifelines.alive(who) and time.monotonic() < end:
                    time.sleep(0.05)
                assert lifelines.tell([who], SEVER, 1.0) == [who]
                own.close()
                assert process.wait(20) == -signal.SIGKILL
            finally:
                process.kill()


HOLD = """
import time
from naranhi.world import lifeline

def on_end(lost):
    raise RuntimeError("nothing can be tidied up")

lifeline.hold({}, on_end)
time.sleep(60)
"""


def test_a_process_ends_with_its_notebook_though_it_cannot_tidy_up():
    lifelines = Lifelines()
    own = server.Server("127.0.0.1", lifeline=lifelines)
    environment = os.environ | {server.ADDRESS: own.address}
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            who = (socket.gethostname(), process.pid)
            end = time.monotonic() + 20
            while not lifelines.alive(who) and time.monotonic() < end:
                time.sleep(0.05)
            assert lifelines.alive(who)
            own.close()  # as if the notebook had died
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()


def test_two_tidy_up_at_once(tmp_path, monkeypatch):
    """The controller and the ranks' parent: what one has found, the other may have removed."""
    monkeypatch.setattr(Path, "exists", lambda path: True)
    leftovers.tidy_up(tmp_path / "gone")


def test_files_of_a_world_are_its_users_alone(world):
    folder = world._ranks.folder
    assert os.stat(folder).st_mode & 0o077 == 0
    assert os.stat(folder).st_uid == os.geteuid()


@pytest.fixture
def nobody(needs):
    """Another user of this machine."""
    needs("setpriv", "util-linux", as_root=True)
    import pwd

    return pwd.getpwnam("nobody")


def test_another_user_cannot_read_what_a_process_of_ours_knows(world, nobody):
    pids = [os.getpid(), *world.run(os.getpid)]
    for path in [world._ranks.folder, *(f"/proc/{pid}/environ" for pid in pids)]:
        tried = subprocess.run(
            ["cat" if path.endswith("environ") else "ls", path],
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
            capture_output=True,
            text=True,
        )
        assert "Permission denied" in tried.stderr and tried.stdout == ""
