"""What can go wrong in a cell: a clear error in time, and the next cell works."""

import os
import time
from pathlib import Path

import pytest

import naranhi
from naranhi.world import World


@pytest.fixture(scope="module")
def world():
    world = World(4, timeout=8.0)
    yield world
    world.close()


@pytest.fixture(autouse=True)
def next_cell_works(world, capsys):
    yield
    world.execute("x = torch.full((2,), rank + 1.0)\ndist.all_reduce(x)\nprint(x.tolist())")
    assert capsys.readouterr().out.splitlines()[-1] == "[ranks 0-3] [10.0, 10.0]"


def failure(world, cell, within):
    start = time.monotonic()
    with pytest.raises(naranhi.RankError) as raised:
        world.execute(cell)
    assert time.monotonic() - start < within
    return raised.value


def test_a_rank_raises(world):
    error = failure(world, "if rank == 2:\n    1 / 0\ndist.all_reduce(torch.ones(3))", within=5)
    first, *_ = str(error).splitlines()
    assert first == "rank 2 raised ZeroDivisionError: division by zero"
    assert "at line 3 of the cell: 1 / 0" in str(error)
    assert "As a consequence:\n  ranks 0-1, 3 " in str(error)
    assert error.rank == 2


def test_a_rank_raises_while_others_receive_from_it(world):
    cell = "if rank == 2:\n    raise KeyError('x')\ndist.recv(torch.ones(3), src=2)"
    error = failure(world, cell, within=5)
    assert str(error).startswith("rank 2 raised KeyError: 'x'")
    assert error.rank == 2


def test_the_same_slip_on_every_rank_is_told_once_and_loses_nothing(world, capsys):
    world.execute("pair = dist.new_group([0, 1])")
    error = failure(world, "undefined_name", within=5)
    assert str(error).splitlines() == [
        "ranks 0-3 raised NameError: name 'undefined_name' is not defined",
        "    at line 2 of the cell: undefined_name",
    ]
    world.execute("print(pair is not None)")
    assert capsys.readouterr().out == "[ranks 0-3] True\n"


def test_a_syntax_error_shows_its_line(world):
    assert "at line 3 of the cell: x = = 2" in str(failure(world, "x = 1\nx = = 2", within=5))


def test_groups_lost_in_a_failure_are_named(world, capsys):
    world.execute("pair = dist.new_group([0, 1])")
    failure(world, "if rank == 0:\n    1 / 0", within=5)
    world.execute("print('pair' in globals())")
    said = capsys.readouterr().out
    assert said == "the process group was rebuilt; create again: pair\n[ranks 0-3] False\n"


def test_a_collective_imported_by_name_works_after_a_failure(world, capsys):
    world.execute("from torch.distributed import all_reduce\nall_reduce(torch.ones(1))")
    failure(world, "if rank == 1:\n    1 / 0\nall_reduce(torch.ones(1))", within=5)
    world.execute("x = torch.ones(1)\nall_reduce(x)\nprint(int(x))")
    assert capsys.readouterr().out.splitlines()[-1] == "[ranks 0-3] 4"


def test_a_rank_is_killed_inside_a_collective(world, capsys):
    cell = (
        "import os, signal, threading\n"
        "if rank == 2:\n"
        "    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "dist.recv(torch.ones(3), src=(rank + 1) % 4)"
    )
    error = failure(world, cell, within=10)
    assert str(error).splitlines()[0] == "rank 2 died (killed by SIGKILL)"
    assert error.rank == 2
    world.execute("print('x' in globals())")
    restarted, after = capsys.readouterr().out.splitlines()
    assert restarted == "ranks 0-3 restarted; the variables of earlier cells are lost"
    assert after == "[ranks 0-3] False"


def test_a_rank_never_calls_the_collective(world):
    error = failure(world, "if rank != 1:\n    dist.all_reduce(torch.ones(3))", within=13)
    assert "rank 1 did not take part within 8 s: at the end of the cell" in str(error)
    assert "ranks 0, 2-3 waited in vain" in str(error)
    assert error.rank == 1


def test_a_rank_is_busy_elsewhere(world):
    cell = (
        "import time\nif rank == 0:\n    time.sleep(600)\nelse:\n    dist.all_reduce(torch.ones(3))"
    )
    error = failure(world, cell, within=13)
    assert "rank 0 did not take part within 8 s: still busy" in str(error)
    assert "at line 4 of the cell: time.sleep(600)" in str(error)
    assert error.rank == 0


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("dist.broadcast(torch.ones(3), src=0)", "broadcast of float32 [3] (src=0)"),
        ("dist.all_reduce(torch.ones(4))", "all_reduce of float32 [4]"),
        ("dist.all_reduce(torch.ones(3).long())", "all_reduce of int64 [3]"),
        ("dist.barrier()", "barrier"),
    ],
)
def test_a_rank_calls_another_collective(world, other, named):
    cell = f"if rank == 3:\n    {other}\nelse:\n    dist.all_reduce(torch.ones(3))"
    error = failure(world, cell, within=13)
    assert str(error).splitlines()[:2] == [
        "rank 3 called a different collective from the rest:",
        f"  rank 3 called {named}",
    ]
    assert error.rank == 3


def test_calls_written_in_two_ways_are_equal(world, capsys):
    world.execute(
        "x, one = torch.ones(3), rank == 1\n"
        "dist.all_reduce(x, **dict(op=dist.ReduceOp.SUM) if one else {})\n"
        "dist.broadcast(x, **dict(group_src=0) if one else dict(src=0))\n"
        "rows = [torch.ones(3) for _ in range(4)] if rank == 0 else None\n"
        "dist.gather(x, rows, **dict(dst=0) if one else {})\n"
        "print(x.tolist())"
    )
    assert capsys.readouterr().out == "[ranks 0-3] [4.0, 4.0, 4.0]\n"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("dist.all_reduce([torch.ones(2)])", "TypeError: Invalid function argument."),
        ("dist.all_gather(torch.ones(2), [torch.ones(2)] * 4)", "TypeError: Invalid function arg"),
        ("dist.all_reduce()", "TypeError: all_reduce() missing 1 required positional argument"),
        # Of torch for gloo; NCCL takes it.
        (
            "dist.all_gather([torch.zeros(1 + r) for r in range(4)], torch.ones(1 + rank))",
            "RuntimeError: ProcessGroupGloo::allgather: invalid tensor size",
        ),
    ],
)
def test_what_torch_refuses_it_refuses_in_its_words(world, cell, words):
    assert f" raised {words}" in str(failure(world, cell, within=13))


def test_equal_reductions_are_equal_as_objects_of_each_rank(world, capsys):
    world.execute(
        "x, op = torch.ones(3), dist.ReduceOp(dist.ReduceOp.SUM)\n"
        "dist.all_reduce(x, op=op)\nprint(x.tolist())"
    )
    assert capsys.readouterr().out == "[ranks 0-3] [4.0, 4.0, 4.0]\n"
    cell = "dist.all_reduce(torch.ones(3), op=dist._make_nccl_premul_sum(1 / (1 + (rank == 2))))"
    error = failure(world, cell, within=13)
    assert str(error).splitlines()[1] == (
        "  rank 2 called all_reduce of float32 [3] (op=PREMUL_SUM by 0.5)"
    )


def test_an_asynchronous_collective_waits_for_no_rank(world, capsys):
    world.execute(
        "x, y = torch.ones(1), torch.ones(1)\n"
        "if rank == 1:\n    dist.recv(y, 0)\n"
        "work = dist.all_reduce(x, async_op=rank == 0)\n"
        "if rank == 0:\n    dist.send(y, 1)\n    work.wait()\n"
        "print(x.item())"
    )
    assert capsys.readouterr().out == "[ranks 0-3] 4.0\n"
    cell = "dist.all_reduce(torch.ones(3 + (rank == 2)), async_op=True).wait()"
    error = failure(world, cell, within=13)
    assert str(error).splitlines()[1] == "  rank 2 called all_reduce of float32 [4]"


def test_a_message_larger_than_its_receiver_expects(world):
    cell = (
        "if rank == 0:\n    dist.send(torch.ones(8), 1)\n"
        "if rank == 1:\n    dist.recv(torch.ones(4), 0)"
    )
    assert str(failure(world, cell, within=10)).startswith("rank 1 died (killed by SIGABRT")


def test_ranks_that_wait_for_each_other(world):
    error = failure(world, "dist.recv(torch.ones(1), src=(rank + 1) % 4)", within=13)
    assert str(error).startswith("every rank waited for another and none could go on within 8 s:")
    assert error.rank is None


def test_two_ranks_that_wait_for_each_other_while_the_rest_is_done(world):
    cell = (
        "pair = dist.new_group([0, 1])\n"
        "if rank < 2:\n    dist.recv(torch.ones(1), src=1 - rank, group=pair)"
    )
    first, _, second = str(failure(world, cell, within=13)).splitlines()
    assert first == "ranks 0-1 waited in vain for a message within 8 s"
    assert second == "meanwhile ranks 2-3 were at the end of the cell"


def test_of_two_ranks_that_wait_for_each_other_the_one_that_is_done_is_not_blamed(world):
    cell = (
        "three = dist.new_group([0, 1, 2])\n"
        "if rank < 3:\n    dist.recv(torch.ones(1), src=(rank + 1) % 3, group=three)"
    )
    error = failure(world, cell, within=13)
    first, _, second = str(error).splitlines()
    assert first == "ranks 0-2 waited in vain for a message within 8 s"
    assert second == "meanwhile rank 3 was at the end of the cell"
    assert error.rank is None


def test_a_collective_on_a_group_of_others(world, capsys):
    world.execute(
        "pair = dist.new_group([0, 1])\nx = torch.ones(1)\ndist.all_reduce(x, group=pair)"
    )
    world.execute("print(int(x))")
    assert capsys.readouterr().out == "[ranks 0-1] 2\n[ranks 2-3] 1\n"


@pytest.mark.parametrize("above", ["\n\n", "%%time\n\n", "x = '''\f\n'''\n"])
def test_lines_are_counted_as_in_the_notebook(world, above):
    """Below blank lines, below another magic, and below a form feed."""
    assert "at line 4 of the cell: 1 / 0" in str(failure(world, f"{above}1 / 0", within=5))


def test_a_word_that_is_no_python_below_another_magic(world):
    assert "at line 3 of the cell: x x" in str(failure(world, "%%time\nx x", within=5))


def test_a_variable_that_not_every_rank_has(world):
    world.execute("if rank != 3:\n    only_here = rank")
    with pytest.raises(naranhi.RankError, match="rank 3 raised NameError: name 'only_here' is not"):
        world["only_here"]


def test_unequal_numbers_of_messages_do_not_disturb_a_collective(world, capsys):
    world.execute(
        "if rank == 0:\n    dist.send(torch.ones(1), 1)\n"
        "if rank == 1:\n    dist.recv(torch.ones(1), 0)\n"
        "dist.barrier()"
    )
    assert capsys.readouterr().out == ""


def test_a_rank_killed_between_cells(world, capsys):
    import os
    import signal

    world.execute("import os\npid = os.getpid()")
    os.kill(world["pid"][1], signal.SIGKILL)
    time.sleep(0.5)
    world.execute("print(rank)")
    assert capsys.readouterr().out.splitlines()[:2] == [
        "rank 1 died since the last cell",
        "ranks 0-3 restarted; the variables of earlier cells are lost",
    ]


def test_a_function_fails(world):
    def fails_on(culprit):
        import torch.distributed as dist

        if dist.get_rank() == culprit:
            raise LookupError("nothing there")
        dist.barrier()

    with pytest.raises(naranhi.RankError, match="rank 1 raised LookupError: nothing there") as told:
        world.run(fails_on, 1)
    assert 'raise LookupError("nothing there")' in str(told.value)


@pytest.fixture
def little_memory():
    """`little_memory(pid)`: the process can have 64 MiB more; beyond, the kernel kills it."""
    root = Path("/sys/fs/cgroup")
    v1 = (root / "memory/memory.limit_in_bytes").exists()
    group = root / ("memory" if v1 else "") / f"naranhi-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if v1 else "memory.max")
        limit.write_text(str(64 << 20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory can be limited here, which takes root and cgroups: {error}")
    yield lambda pid: (group / "cgroup.procs").write_text(str(pid))
    while (group / "cgroup.procs").read_text():
        time.sleep(0.1)
    group.rmdir()


def test_a_rank_that_the_kernel_kills_for_lack_of_memory(world, little_memory):
    little_memory(world.run(os.getpid)[1])
    error = failure(world, "if rank == 1:\n    bytearray(1 << 28)\ndist.barrier()", within=10)
    assert str(error).splitlines()[0] == (
        "rank 1 died (killed by the kernel, which had no memory left for it)"
    )
    world.execute("pass")  # starts the ranks again, which on a busy machine takes as long
    cell = (
        "import os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    )
    error = failure(world, cell, within=10)
    assert str(error).startswith("rank 1 died (killed by SIGKILL)")  # and not the earlier one
