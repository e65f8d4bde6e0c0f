"""Whatever a cell raises, exhausts or takes away: a RankError, and the next cell works."""

import os
import signal
import socket
import time

import pytest
from kernels import processes_of, wait_until

import naranhi
from naranhi.world import World
from naranhi.world.errors import kind, unknown


@pytest.fixture(scope="module")
def world():
    world = World(2, timeout=8.0)
    yield world
    world.close()


@pytest.fixture(autouse=True)
def next_cell_works(world, capsys):
    yield
    world.execute("x = torch.full((2,), rank + 1.0)\ndist.all_reduce(x)\nprint(x.tolist())")
    assert capsys.readouterr().out.splitlines()[-1] == "[ranks 0-1] [3.0, 3.0]"


UNTELLABLE = """
class {name}(Exception):
    def __str__(self):
        {body}
if rank == 1:
    raise {name}()
dist.barrier()
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no')", "<an error without words: its __str__ raised ValueError>"),
        ("raise SystemExit(3)", "<an error without words: its __str__ raised SystemExit>"),
        ("return 3", "<an error without words: its __str__ raised TypeError>"),
        ("return '\\udc80'", "\\udc80"),
        ("return type('Text', (str,), {})('odd')", "odd"),
    ],
)
def test_an_exception_that_cannot_be_told(world, body, message):
    start = time.monotonic()
    with pytest.raises(naranhi.RankError) as failed:
        world.execute(UNTELLABLE.format(name="Odd", body=body))
    assert time.monotonic() - start < 6
    assert str(failed.value).startswith(f"rank 1 raised Odd: {message}\n    at line 7 of the cell")
    assert failed.value.rank == 1


OWN_REPR = """
class Odd:
    def __repr__(self):
        raise ValueError("real cause")
Odd() if rank == 1 else None
"""


@pytest.mark.parametrize(
    "cell",
    [
        "%%capture out\nif rank == 1:\n    raise ValueError('real cause')\ndist.barrier()",
        "import pathlib\n"
        "pathlib.Path(f'{rank}.py').write_text('raise ValueError(\"real cause\")')\n"
        "if rank == 1:\n    get_ipython().run_line_magic('run', '1.py')\ndist.barrier()",
        "if rank == 1:\n    get_ipython().run_cell('raise ValueError(\"real cause\")')\n    1 / 0",
        OWN_REPR,
    ],
    ids=["capture", "run", "consequence", "repr"],
)
def test_an_error_that_ipython_only_shows(world, tmp_path, cell):
    world.execute(f"import os\nbefore = os.getcwd()\nos.chdir({str(tmp_path)!r})")
    with pytest.raises(naranhi.RankError, match="rank 1 raised ValueError: real cause"):
        world.execute(cell)
    world.execute("os.chdir(before)")


@pytest.mark.parametrize("magic", ["", "%%capture out\n"])
def test_an_error_is_not_kept_after_its_cell(world, magic):
    """Its frames hold what the cell held, such as a model."""
    cell = f"{magic}import weakref\nclass Held: pass\ndef fail():\n    held = Held()\n"
    cell += "    globals()['alive'] = weakref.ref(held)\n    raise ValueError('no')\nfail()"
    with pytest.raises(naranhi.RankError, match="raised ValueError: no"):
        world.execute(cell)
    assert world.run(lambda: __import__("gc").collect()) != []
    world.execute("is_alive = alive() is not None")
    assert world["is_alive"] == [False, False]


def test_an_error_shown_within_a_function_is_not_the_next_cell_s(world):
    def fails():
        from IPython import get_ipython

        get_ipython().run_cell("1 / 0")
        return 3

    assert world.run(fails) == [3, 3]
    world.execute("x = 1")


TASKS = """
import asyncio
async def fail():
    raise ValueError("real cause")
async def both():
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
await both()
"""


def test_the_causes_within_a_group_of_errors(world):
    cause = r"raised ExceptionGroup: unhandled errors in a TaskGroup: ValueError: real cause\n"
    with pytest.raises(naranhi.RankError, match=cause):
        world.execute(TASKS)


def test_a_timeout_and_a_mismatch_can_be_sent(world):
    world.execute("from naranhi.world.collective_checks import *")
    world.execute("late = CollectiveTimeout('all_reduce', [1])\nodd = CollectiveMismatch({0: 'a'})")
    for late, odd in zip(world["late"], world["odd"], strict=True):
        assert str(late) == "waited in vain for ranks [1] to call all_reduce"
        assert (late.call, late.absent, odd.calls) == ("all_reduce", [1], {0: "a"})
        assert str(odd) == "the ranks called different collectives: {0: 'a'}"


def test_an_exception_with_attributes_like_ours(world):
    cell = "class Odd(Exception):\n    calls = absent = 7\nif rank == 1:\n    raise Odd('mine')"
    with pytest.raises(naranhi.RankError, match="rank 1 raised Odd: mine"):
        world.execute(cell)


@pytest.mark.parametrize(
    "message", ["the database timed out: host db7", "worker 3 was killed by a signal: Aborted"]
)
def test_an_error_that_sounds_like_a_lost_message(world, message):
    cell = f"if rank == 1:\n    raise RuntimeError({message!r})\ndist.barrier()"
    with pytest.raises(naranhi.RankError, match=f"rank 1 raised RuntimeError: {message}"):
        world.execute(cell)


def test_a_wait_for_a_message_in_the_cells_own_line():
    frames = [("/tmp/ipykernel_1/2.py", 3, "<module>", "work.wait()")]
    for message in (
        "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation",
        "Application timeout caused pair closure",
    ):
        error = {**unknown("RuntimeError", message), "frames": frames}
        assert kind(error) == "deadline"


@pytest.mark.parametrize("line", ["math.no_such_name", "x = = 1"])
def test_an_error_in_a_module_that_a_cell_imports(world, tmp_path, line):
    (tmp_path / "helper.py").write_text(f"import math\n\n{line}\n")
    world.execute(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nsys.modules.pop('helper', 0)"
    )
    with pytest.raises(naranhi.RankError) as failed:
        world.execute("x = 1\nx = 2\nx = 3\nimport helper")
    assert "at line 5 of the cell: import helper" in str(failed.value)
    assert ("(helper.py:3): math.no_such_name" in str(failed.value)) == ("math" in line)


def test_a_closed_stdout_and_an_error(world):
    with pytest.raises(naranhi.RankError, match="rank 0 raised KeyError: 'x'") as failed:
        world.execute("import sys\nif rank == 0:\n    sys.stdout.close()\n    raise KeyError('x')")
    assert failed.value.rank == 0


def test_a_result_whose_text_cannot_be_made(world):
    cell = "class Odd:\n    def __repr__(self):\n        raise SystemExit\nrank or Odd()"
    with pytest.raises(naranhi.RankError, match="rank 0 raised SystemExit"):
        world.execute(cell)


def test_the_world_itself_cannot_travel(world):
    with pytest.raises(TypeError, match="a World cannot be pickled"):
        world.run(lambda: world.size)


@pytest.mark.parametrize("cell", ["exit()", "if rank == 1:\n    quit()"])
def test_a_cell_that_would_end_its_rank(world, cell):
    world.execute("kept = 1")
    with pytest.raises(naranhi.RankError, match="exit and quit would end this rank"):
        world.execute(cell)
    assert world["kept"] == [1, 1]


def test_a_request_that_the_store_cannot_serve(world):
    cell = (
        "store = dist.distributed_c10d._get_default_store()\nstore.set('k', 'x')\nstore.add('k', 1)"
    )
    with pytest.raises(naranhi.RankError, match="notebook's store failed on this add"):
        world.execute(cell)


def test_a_forked_child_of_the_notebook_leaves_the_ranks_alone(world):
    world.execute("kept = 1")
    if (pid := os.fork()) == 0:
        try:
            world.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert world["kept"] == [1, 1]


def test_a_host_name_that_changes(world, monkeypatch):
    world.execute("kept = 1")
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop-vpn")
    assert world["kept"] == [1, 1]


def test_a_world_within_a_rank_is_refused(world):
    message = "this process is a rank of a World, and a rank starts no other World; start it in a"
    with pytest.raises(naranhi.RankError, match=f"raised RankError: {message} cell without"):
        world.execute("import naranhi\nnaranhi.World(1)")


def test_a_value_that_cannot_travel(world):
    world.execute("import threading\nlock = threading.Lock()")
    with pytest.raises(naranhi.RankError, match="ranks 0-1 raised TypeError: cannot pickle"):
        world["lock"]


LIMITED = """
import resource
if rank == 1:
    used = int(open('/proc/self/statm').read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
    kept = []
    while True:
        kept.append({allocate})
dist.barrier()
"""


@pytest.mark.parametrize("allocate", ["bytearray(100_000)", "[0] * 50", "torch.empty(100_000)"])
def test_a_memory_limit_reached_in_small_pieces(world, capsys, allocate):
    with pytest.raises(naranhi.RankError, match=r"rank 1 (raised|died)") as failed:
        world.execute(LIMITED.format(allocate=allocate))
    assert failed.value.rank == 1
    assert "memory" in str(failed.value).lower()
    world.execute("print('on')")
    assert capsys.readouterr().out.splitlines() == [
        "ranks 0-1 restarted; the variables of earlier cells are lost",
        "[ranks 0-1] on",
    ]


def test_one_allocation_that_is_too_large_loses_nothing(world, capsys):
    world.execute("kept = rank")
    with pytest.raises(naranhi.RankError, match="ranks 0-1 raised MemoryError"):
        world.execute("bytearray(1 << 60)")
    world.execute("print(kept)")
    assert capsys.readouterr().out == "[rank 0] 0\n[rank 1] 1\n"


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e12, 0, -1])
def test_a_deadline_that_is_none(timeout):
    with pytest.raises(ValueError, match="above 0 and at most 1e\\+06"):
        World(2, timeout=timeout)


# ---- what every cell finds at hand --------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("torch = None", "torch"),
        ("import random as dist\nrank = 'mine'", "dist, rank"),
        ("del device, world_size", "device, world_size"),
        ("%reset -f", "device, dist, rank, torch, world_size"),
        ("if rank == 1:\n    torch = 3\n    1 / 0", "torch"),
    ],
)
def test_names_that_a_cell_takes_away_are_put_back(world, capsys, cell, names):
    try:
        world.execute(cell)
    except naranhi.RankError as failed:
        assert "1 / 0" in str(failed)
    said = f"restored, because every cell relies on them: {names}"
    assert capsys.readouterr().out.splitlines() == [said]
    world.execute("assert torch.ones(1).item() == 1 and dist.get_rank() == rank")
    assert world.run(lambda: 1) == [1, 1]


@pytest.mark.parametrize(
    "cell",
    [
        "dist.destroy_process_group()",
        "if rank == 0:\n    dist.destroy_process_group()",
        "dist.destroy_process_group()\ndist.init_process_group('gloo', rank=0, world_size=1, "
        "store=dist.HashStore())",
    ],
)
def test_a_cell_that_destroys_the_default_group(world, capsys, cell):
    world.execute("pair = dist.new_group([0, 1])")
    world.execute(cell)
    world.execute("x = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())")
    assert capsys.readouterr().out.splitlines() == [
        "the process group was rebuilt, because a cell had left it (destroy_process_group); "
        "create again: pair",
        "[ranks 0-1] 2.0",
    ]


def test_a_group_that_the_notebook_aborts_was_left_by_no_cell(world, capsys):
    """On NCCL every wait is ended so; here the ranks only say that this is their backend."""
    world.execute("kept = dist.get_backend\ndist.get_backend = lambda group=None: 'nccl'")
    with pytest.raises(naranhi.RankError, match="rank 1 raised ZeroDivisionError"):
        world.execute("if rank == 1:\n    1 / 0\ndist.recv(torch.ones(1), 1)")
    world.execute("dist.get_backend = kept")
    assert "because a cell had left it" not in capsys.readouterr().out


def test_a_collective_behind_the_end_of_the_group(world):
    with pytest.raises(naranhi.RankError, match="Default process group has not been initialized"):
        world.execute("dist.destroy_process_group()\ndist.barrier()")


def test_a_collective_in_a_compiled_function(world, capsys):
    world.execute(
        "@torch.compile(fullgraph=True, backend='eager')\n"
        "def doubled(x):\n    dist.all_reduce(x)\n    return 2 * x\n"
        "print(doubled(torch.ones(2)).tolist())"
    )
    assert capsys.readouterr().out == "[ranks 0-1] [4.0, 4.0]\n"


# ---- gloo's own words ---------------------------------------------------------------------------


def test_a_message_of_another_size_is_quoted_each_time(world, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # under which ipykernel does other things with output
    cell = "if rank == 0:\n    dist.send(torch.ones(8), 1)\nelse:\n    dist.recv(torch.ones(4), 0)"
    for _ in range(3):
        with pytest.raises(naranhi.RankError) as failed:
            world.execute(cell)
        first = str(failed.value).splitlines()[0]
        assert first.startswith("rank 1 died (killed by SIGABRT: ") and "32 vs 16" in first


# ---- the controller -----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["between", "during"])
def test_the_controller_dies(world, capsys, moment):
    controller = world._ranks._cluster.controller.pid
    before = processes_of(os.getpid())
    if moment == "between":
        os.kill(controller, signal.SIGKILL)
        # Its scheduler holds the lifeline open until it has been ended too.
        wait_until(lambda: not world._ranks.controller_alive(), 5)
    else:
        start = time.monotonic()
        with pytest.raises(naranhi.RankError, match="the controller died"):
            world.execute(
                f"import os, time\nif rank == 0:\n    os.kill({controller}, 9)\ntime.sleep(600)"
            )
        assert time.monotonic() - start < 12
    world.execute("print('on')")
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "ranks 0-1 restarted; the variables of earlier cells are lost",
        "[ranks 0-1] on",
    ]
    assert moment == "during" or said[0] == "the controller died since the last cell"
    wait_until(lambda: not {controller, *before} & {*processes_of(os.getpid())}, 5)


# ---- results ------------------------------------------------------------------------------------


def resident(pid):
    return int(open(f"/proc/{pid}/statm").read().split()[1]) * 4096


def test_results_stay_nowhere(world):
    """Six times 40 MiB from each rank; malloc returns blocks above 32 MiB when they are freed."""
    pids = os.getpid(), world._ranks._cluster.controller.pid
    for _ in range(3):
        world.run(bytes, 40 << 20)
    before = [resident(pid) for pid in pids]
    for _ in range(6):
        assert [len(result) for result in world.run(bytes, 40 << 20)] == [40 << 20] * 2

    def stays():  # the controller may still be passing on the last of them
        return [resident(pid) - old for pid, old in zip(pids, before, strict=True)]

    end = time.monotonic() + 10
    while max(grown := stays()) >= 100 << 20:
        assert time.monotonic() < end, grown
        time.sleep(0.1)
