"""World inside real notebook kernels: interrupts, deaths, two at once, no network."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from kernels import START, CellError, notebook, processes_of, wait_until

HELLO = "%%ranks\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())"
WORKS = "[ranks 0-3] 4.0\n"


@pytest.fixture(scope="module")
def book():
    with notebook() as opened:
        opened.run(START)
        yield opened


@pytest.mark.parametrize(
    "cell", ["import time\ntime.sleep(600)", "dist.recv(torch.ones(1), src=(rank + 1) % 4)"]
)
def test_the_reader_interrupts_a_cell(book, cell):
    assert book.run(HELLO) == WORKS
    request = book.begin("%%ranks\n" + cell)
    time.sleep(1.5)
    start = time.monotonic()
    book.interrupt()
    with pytest.raises(CellError) as stopped:
        book.finish(request, timeout=10)
    assert time.monotonic() - start < 5
    last = cell.splitlines()[-1]
    assert stopped.value.text.splitlines()[0] == "RankInterrupt: the cell was interrupted"
    assert f"at line {len(cell.splitlines()) + 1} of the cell: {last}" in stopped.value.text
    assert book.run(HELLO) == WORKS


def test_a_second_interrupt_loses_nothing(book):
    book.run("%%ranks\nmodel = 'trained for hours'")
    request = book.begin("%%ranks\nimport time\nprint('epoch 1 done')\ntime.sleep(600)")
    for pause in 1.5, 0.3, 0.3:
        time.sleep(pause)
        book.interrupt()
    with pytest.raises(CellError) as stopped:
        book.finish(request, timeout=15)
    assert stopped.value.text.startswith("RankInterrupt: the cell was interrupted")
    assert stopped.value.printed == "[ranks 0-3] epoch 1 done\n"
    assert book.run("%%ranks\nprint(model)") == "[ranks 0-3] trained for hours\n"


def test_a_process_group_in_the_notebook_itself(book):
    with pytest.raises(CellError, match="the notebook's own process, which is not a rank"):
        book.run("import torch.distributed as dist\ndist.init_process_group('gloo')")
    assert book.run(HELLO) == WORKS


def test_a_failure_shows_the_reader_nothing_of_our_frames(book):
    with pytest.raises(CellError) as failed:
        book.run("%%ranks\nif rank == 0:\n    1 / 0")
    assert failed.value.text.startswith("RankError: rank 0 raised ZeroDivisionError")
    assert "world.py" not in failed.value.text
    assert book.run("%%ranks\nprint('on')") == "[ranks 0-3] on\n"


def test_the_magic_takes_no_arguments(book):
    with pytest.raises(CellError, match="%%ranks takes no arguments, and got '0'"):
        book.run("%%ranks 0\n1")


def test_the_notebook_run_again_from_the_top(book):
    before = set(processes_of(book.pid))
    book.run(START)
    after = set(processes_of(book.pid))
    assert len(before) == len(after) > 4
    assert not before & after
    assert book.run(HELLO) == WORKS


def test_a_closed_world_says_how_to_start_another():
    with notebook() as opened:
        opened.run("import naranhi\nworld = naranhi.World(1)\nworld.close()")
        with pytest.raises(CellError, match=r"start them: world = naranhi.World\(4\)"):
            opened.run("%%ranks\n1")


def test_two_notebooks_at_once_and_the_death_of_one():
    with notebook() as one, notebook() as two:
        requests = one.begin(START), two.begin(START)
        one.finish(requests[0])
        two.finish(requests[1])
        assert one.run(HELLO) == WORKS
        request = one.begin("%%ranks\nimport time\ntime.sleep(600)")
        assert two.run(HELLO) == WORKS
        assert len(processes_of(one.pid)) > 4
        os.kill(one.pid, signal.SIGKILL)
        wait_until(lambda: not processes_of(one.pid), 10)
        assert request
        assert two.run(HELLO) == WORKS


def test_nothing_is_left_when_the_notebook_ends():
    with notebook() as opened:
        opened.run(START + "\nfolder = world._ranks.folder\nprint(folder)")
        folder = opened.run("print(folder)").strip()
        assert os.path.isdir(folder)
        pid = opened.pid
    wait_until(lambda: not processes_of(pid) and not os.path.exists(folder), 10)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="a machine without a network is made with `ip` (Debian: iproute2), as root",
)
@pytest.mark.parametrize("loopback", ["up", "down"])
def test_no_network_at_all(loopback):
    program = (
        "import naranhi\n"
        "world = naranhi.World(2)\n"
        "world.execute('x = torch.ones(1); dist.all_reduce(x); print(x.item())')\n"
        "world.close()"
    )
    setup = "ip link set lo up && " if loopback == "up" else ""
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f'{setup}exec "$0" -c "$1"', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=90,
    )
    if loopback == "up":
        assert done.stdout == "[ranks 0-1] 2.0\n"
        assert done.returncode == 0
    else:
        assert "loopback interface does not answer" in done.stderr
        assert "ip link set lo up" in done.stderr
