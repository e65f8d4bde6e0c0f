"""What is printed on a rank is shown with its rank, whoever prints it; ``await`` and ``input``."""

import contextlib
import time
from pathlib import Path

import pytest
from kernels import wait_until

import naranhi
from naranhi.world import World


@pytest.fixture(scope="module")
def world():
    world = World(2, timeout=8.0)
    yield world
    world.close()


@pytest.fixture(autouse=True)
def next_cell_works(world, capsys):
    yield
    capsys.readouterr()
    world.execute("print('on', flush=True)")
    assert capsys.readouterr().out.splitlines()[-1] == "[ranks 0-1] on"


@pytest.mark.parametrize(
    "prints",
    [
        "import subprocess\nsubprocess.run(['echo', 'hello'], check=True);",
        "import os\nassert os.system('echo hello') == 0",
        "import os\nos.write(1, b'hello\\n');",
        "import ctypes\nctypes.CDLL(None).puts(b'hello');",
        "import sys\nsys.stdout.buffer.write(b'hello\\n');",
        "import sys\nsys.__stdout__.write('hello\\n');",
        "import sys\nsys.stdout.reconfigure(line_buffering=False)\nprint('hello')",
    ],
)
def test_what_others_than_python_print(world, capsys, prints):
    world.execute(prints)
    assert capsys.readouterr().out == "[ranks 0-1] hello\n"


def test_the_order_of_what_is_printed_is_kept(world, capsys):
    world.execute(
        "import os\nprint('first')\nassert os.system(f'echo second {rank}') == 0\nprint('third')"
    )
    assert capsys.readouterr().out.splitlines() == [
        *("[rank 0] first", "[rank 0] second 0", "[rank 0] third"),
        *("[rank 1] first", "[rank 1] second 1", "[rank 1] third"),
    ]


def test_a_child_that_writes_to_stderr(world, capsys):
    world.execute("import os\nassert rank == 0 or os.system('echo careful >&2') == 0")
    assert capsys.readouterr().err == "[rank 1] careful\n"


def test_a_thread_that_outlives_its_cell_is_shown_with_the_next(world, capsys):
    world.execute(
        "import threading\n"
        "go = threading.Event()\n"
        "late = threading.Thread(target=lambda: (go.wait(), print('late')))\n"
        "late.start()\n"
        "print('now')"
    )
    assert capsys.readouterr().out == "[ranks 0-1] now\n"
    world.execute("go.set()\nlate.join()")
    assert capsys.readouterr().out == "[ranks 0-1] late\n"


def test_what_is_printed_between_two_cells_is_shown_with_the_next(world, capsys, tmp_path):
    go, done = tmp_path / "go", tmp_path / "done"
    done.mkdir()
    world.execute(
        "import subprocess, threading, time\nfrom pathlib import Path\n"
        "def late():\n"
        f"    while not Path({str(go)!r}).exists():\n        time.sleep(0.01)\n"
        "    print('late')\n"
        "    subprocess.run(['echo', 'its child'], check=True)\n"
        f"    Path({str(done)!r}, str(rank)).touch()\n"
        "threading.Thread(target=late).start()"
    )
    go.touch()
    wait_until(lambda: len([*done.iterdir()]) == 2, 20)
    assert capsys.readouterr().out == ""
    world.execute("print('next')")
    shown = ["late", "its child", "next"]
    assert capsys.readouterr().out.splitlines() == [f"[ranks 0-1] {line}" for line in shown]


def test_what_a_rank_had_printed_before_it_died(world, capsys):
    with pytest.raises(naranhi.RankError, match="rank 1 died"):
        world.execute("import os\nprint('about to end', rank)\nif rank == 1:\n    os._exit(3)")
    assert "[rank 1] about to end 1\n" in capsys.readouterr().out


def test_large_output_comes_whole_and_does_not_stay_on_the_rank(world, capsys):
    cell = "for i in range(1 << 14):\n    print(f'{i:127}')"  # as many strings, for who keeps them
    resident = []

    def pages():
        return int(Path("/proc/self/statm").read_text().split()[1])

    for _ in range(12):
        world.execute(cell)
        assert capsys.readouterr().out.count(" " * 122) == 1 << 14
        resident.append(max(world.run(pages)) * 4096)
    assert resident[-1] - resident[3] < 8 << 20, "2 MiB a cell, eight cells"
    files = [*Path(world._ranks.folder).glob("*.out")]
    assert len(files) == 2
    kept = [file.stat().st_blocks * 512 for file in files]
    assert max(kept) < 8 << 20, "and what was shown is not kept"


FLOOD = """
import subprocess, sys
lines = "import os\\nfor i in range(100_000): os.write(1, b'%06d' % i + b'x' * 100 + b'\\\\n')"
flood = subprocess.Popen([sys.executable, "-c", lines])
"""


def test_output_that_comes_while_cells_end_is_whole(world, capsys):
    """Each 10 MB are taken in many pieces, while the child writes on."""
    world.execute(FLOOD)
    seen, end = {}, time.monotonic() + 60
    while time.monotonic() < end:
        ended = world.run(lambda: __import__("__main__").flood.poll()) != [None, None]
        world.execute("done = flood.poll() is not None")
        for line in capsys.readouterr().out.splitlines():
            label, _, text = line.rpartition("] ")
            for rank in (0, 1) if "-" in label else (int(label[-1]),):
                seen.setdefault(rank, []).append(int(text[:6]))
        if ended and all(world["done"]):
            break
    assert seen == {0: [*range(100_000)], 1: [*range(100_000)]}


def test_a_line_that_is_half_written_as_its_cell_ends_is_waited_for(world, capsys):
    """One ``write`` of 64 MB takes tens of milliseconds, while the file grows page by page."""
    world.execute(
        "import os, threading, time\n"
        "line = b'x' * (64 << 20) + b'\\n'\n"
        "writing = threading.Thread(target=os.write, args=(1, line))\n"
        "before = os.fstat(1).st_size\n"
        "if rank == 0:\n"
        "    writing.start()\n"
        "    while os.fstat(1).st_size == before: time.sleep(0)"
    )
    assert len(capsys.readouterr().out) == len("[rank 0] ") + (64 << 20) + 1
    world.execute("if rank == 0: writing.join()\ndel line, writing")
    assert capsys.readouterr().out == ""


def test_of_a_progress_bar_the_last_state_is_shown(world, capsys):
    world.execute(
        "import sys\nfor i in range(5):\n    print(f'\\r{i} of 4', end='', file=sys.stderr)\n"
        "print(file=sys.stderr)\nprint('a\\r\\nb\\n\\nc')"
    )
    shown = capsys.readouterr()
    assert shown.err == "[ranks 0-1] 4 of 4\n"
    assert shown.out.splitlines() == [f"[ranks 0-1] {line}" for line in ("a", "b", "", "c")]


@pytest.mark.parametrize(
    "breaks",
    [
        "import sys\nsys.stdout.close()",
        "import sys\nsys.stdout = sys.stderr = None",
        "import sys\nsys.stdout.write = None",
        "import os\nos.close(1)\nos.close(2)",
        "import os\nos.dup2(os.open('/dev/null', os.O_WRONLY), 1);",
        "import sys\ndel sys.stdout, sys.stderr",
    ],
)
def test_a_stream_that_a_cell_breaks_is_whole_in_the_next(world, breaks):
    with contextlib.suppress(naranhi.RankError):  # IPython itself may miss what was deleted
        world.execute(breaks)


def test_await_in_a_cell(world, capsys):
    cell = "import asyncio\nawait asyncio.sleep(0)\nprint('slept')\nawait asyncio.sleep(0, 3)"
    world.execute(cell)
    assert capsys.readouterr().out == "[ranks 0-1] slept\n[ranks 0-1] 3\n"
    world.execute("task = asyncio.ensure_future(asyncio.sleep(0, rank))\nprint(await task)")
    assert capsys.readouterr().out == "[rank 0] 0\n[rank 1] 1\n"
    world.execute(
        "async def main():\n    await asyncio.sleep(0)\n    return 'ran'\nasyncio.run(main())"
    )
    assert capsys.readouterr().out == "[ranks 0-1] 'ran'\n"


def test_an_error_in_what_is_awaited(world):
    with pytest.raises(naranhi.RankError, match="rank 1 raised KeyError: 'gone'") as failed:
        world.execute(
            "import asyncio\nasync def fail():\n    await asyncio.sleep(0)\n"
            "    if rank == 1: raise KeyError('gone')\nawait fail()"
        )
    assert "at line 6 of the cell: await fail()" in str(failed.value)


def test_a_rank_has_no_keyboard(world):
    with pytest.raises(naranhi.RankError, match="a rank has no keyboard") as refused:
        world.execute("name = input('name? ')")
    assert "at line 2 of the cell: name = input('name? ')" in str(refused.value)
