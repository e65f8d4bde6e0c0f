"""Ranks that do not run: stopped, or busy in C with the interpreter's lock held."""

import os
import time

import pytest
from kernels import wait_until

import naranhi
from naranhi.distributed import processes
from naranhi.world import World

TIMEOUT = 3.0


@pytest.fixture(scope="module")
def world():
    world = World(3, timeout=TIMEOUT)
    yield world
    world.close()


@pytest.fixture(autouse=True)
def next_cell_works(world, capsys):
    yield
    world.execute("x = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())")
    assert capsys.readouterr().out.splitlines()[-1] == "[ranks 0-2] 3.0"


STOPS = "import os, signal, time\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
# PyDLL keeps the interpreter's lock while the function runs.
HOLDS = "import ctypes\nif rank == 1:\n    ctypes.PyDLL(None).sleep(600)\n"


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (
            STOPS + "dist.all_reduce(torch.ones(1))",
            "rank 1 did not take part within 3 s: frozen (its process is stopped)",
        ),
        (
            STOPS + "if rank == 0:\n    dist.recv(torch.ones(1), 1)",
            "meanwhile rank 1 was frozen (its process is stopped)",
        ),
        (STOPS, "rank 1 was frozen (its process is stopped) for 3 s"),
        (
            HOLDS + "dist.all_reduce(torch.ones(1))",
            "rank 1 did not take part within 3 s: busy outside of Python",
        ),
    ],
)
def test_a_rank_that_does_not_run_is_named_in_time(world, cell, sentence):
    pid = world.run(os.getpid)[1]
    start = time.monotonic()
    with pytest.raises(naranhi.RankError) as failed:
        world.execute(cell)
    assert time.monotonic() - start < TIMEOUT + 14
    assert sentence in str(failed.value)
    assert failed.value.rank == 1
    wait_until(lambda: processes.is_gone(pid), 5)


def test_a_rank_that_is_stopped_for_a_moment_goes_on(world, capsys):
    pid = world.run(os.getpid)[2]
    world.execute(
        "import os, signal, time\n"
        f"if rank == 0:\n    os.kill({pid}, signal.SIGSTOP)\n    time.sleep(1)\n"
        f"    os.kill({pid}, signal.SIGCONT)\ndist.barrier()\nprint('on')"
    )
    assert capsys.readouterr().out == "[ranks 0-2] on\n"
