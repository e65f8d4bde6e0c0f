"""What is left when a World ends in which processes are stopped, and what a long sleep does."""

import functools
import os
import signal
import subprocess
import sys
import time

import pytest
from kernels import CellError, notebook, processes_of, stop, wait_until

import naranhi
from naranhi.distributed import processes
from naranhi.world import World, cluster


def test_close_with_a_stopped_rank_leaves_nothing():
    other = World(2)
    pids = [*other.run(os.getpid), *(launcher.pid for launcher in other._ranks._launchers())]
    folder = other._ranks.folder
    for pid in pids[1:]:  # the controller and the ranks' parent, too
        stop(pid)
    start = time.monotonic()
    other.close()
    assert time.monotonic() - start < 10
    assert not os.path.exists(folder)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 5)


def test_close_on_a_machine_too_slow_to_end_in_time():
    """Processes that were killed, and still seem alive when the wait for them ends."""
    other = World(2)
    folder, lifelines = other._ranks.folder, other._ranks.lifelines
    lifelines.kill = functools.partial(lifelines.kill, seconds=0.0)
    other.close()
    assert not os.path.exists(folder)


def test_what_a_rank_has_started_ends_with_it():
    """Of a rank that is killed and one that goes on, until the World is closed."""
    other = World(2)
    cell = "import os, signal, subprocess\nchild = subprocess.Popen(['sleep', '600']).pid"
    other.execute(cell)
    children = other["child"]
    with pytest.raises(naranhi.RankError):
        other.execute("if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    wait_until(lambda: not os.path.exists(f"/proc/{children[1]}"), 5)
    other.close()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), 5)


@pytest.mark.parametrize("stopped", ["rank", "controller", "parent"])
def test_the_death_of_a_notebook_with_a_stopped_process_leaves_nothing(stopped):
    """Started without a kernel, to be quicker."""
    program = (
        "import naranhi, os, sys, time\n"
        "world = naranhi.World(2)\n"
        "ranks = world.run(os.getpid)\n"
        "launchers = [launcher.pid for launcher in world._ranks._launchers()]\n"
        "print(*launchers, *ranks, world._ranks.folder, flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        *pids, folder = started.stdout.readline().split()
        pids = dict(zip(("controller", "parent", "other", "rank"), map(int, pids), strict=True))
        stop(pids[stopped])
        started.kill()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids.values()), 10)
    wait_until(lambda: not os.path.exists(folder), 5)


def test_the_reader_interrupts_a_cell_with_a_stopped_rank():
    with notebook() as opened:
        opened.run("import naranhi\nworld = naranhi.World(2)")
        request = opened.begin(
            "%%ranks\nimport os, signal, time\n"
            "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)"
        )
        wait_until(lambda: any(map(processes.is_stopped, processes_of(opened.pid))), 20)
        start = time.monotonic()
        opened.interrupt()
        with pytest.raises(CellError) as stopped:
            opened.finish(request, timeout=20)
        assert time.monotonic() - start < 15
        assert "RankInterrupt: the cell was interrupted" in stopped.value.text
        assert "rank 1 did not stop (frozen (its process is stopped)) and was ended" in (
            stopped.value.text
        )
        assert opened.run("%%ranks\nprint('on')").splitlines()[-1] == "[ranks 0-1] on"


def test_all_stand_still_for_long_as_on_a_laptop_asleep(monkeypatch, capsys):
    """Two hundred heartbeats long, at which the controller has given up its engines before."""
    monkeypatch.setattr(cluster, "HEARTBEAT_MS", 20)
    other = World(2)
    other.execute("kept = rank")
    pids = [*other.run(os.getpid), *(launcher.pid for launcher in other._ranks._launchers())]
    controller = other._ranks._cluster.controller.pid
    ranks = [pid for pid in pids if pid != controller]
    for pid in ranks:
        stop(pid)
    time.sleep(8)  # this is how long they sleep
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    try:
        other.execute("x = torch.ones(1)\ndist.all_reduce(x)\nprint(kept, x.item())")
    finally:
        other.close()
    assert capsys.readouterr().out.splitlines()[-2:] == ["[rank 0] 0 2.0", "[rank 1] 1 2.0"]
