"""World as a reader uses it: output, results, arguments, what it leaves and what it opens."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

import naranhi
from naranhi.world import World, launch


@pytest.fixture(scope="module")
def world():
    world = World(4)
    yield world
    world.close()


def test_four_ranks_are_ready_within_twelve_seconds():
    seconds = []
    for _ in range(2):  # the first start of the day reads torch from the disk
        start = time.monotonic()
        world = World(4)
        seconds.append(time.monotonic() - start)
        world.close()
    assert min(seconds) < 12


@pytest.mark.parametrize("removed", [False, True], ids=["at once", "their output removed"])
def test_ranks_that_do_not_come_up_are_quoted(monkeypatch, removed):
    said = launch.Launched._said

    def said_late(launched):
        ranks = launched._cluster.engine_set
        ranks.notify_stop({})  # as ipyparallel does, a moment before or after this
        assert not Path(ranks.output_file).exists()
        return said(launched)

    if removed:
        monkeypatch.setattr(launch.Launched, "_said", said_late)
    monkeypatch.setattr(launch.fork, "__name__", "naranhi.world.not_there")
    with pytest.raises(naranhi.RankError, match="0 of 4 ranks were up") as raised:
        World(4)
    assert "No module named naranhi.world.not_there" in str(raised.value)


def test_output_comes_in_rank_order_with_equal_neighbours_folded(world, capsys):
    world.execute("import time\ntime.sleep(0.2 * (3 - rank))\nprint('hello')\nprint(rank // 2)")
    assert capsys.readouterr().out == (
        "[ranks 0-1] hello\n[ranks 0-1] 0\n[ranks 2-3] hello\n[ranks 2-3] 1\n"
    )


def test_the_last_expression_is_shown(world, capsys):
    world.execute("torch.tensor([rank])")
    shown = "".join(f"[rank {r}] tensor([{r}])\n" for r in range(4))
    assert capsys.readouterr().out == shown


def test_a_result_ended_by_a_semicolon_is_not_shown(world, capsys):
    world.execute("rank;")
    assert capsys.readouterr().out == ""


def test_ranks_draw_random_numbers_of_their_own(world):
    world.execute(
        "import random, numpy\ndrawn = random.random(), numpy.random.rand(), torch.rand(1).item()"
    )
    for numbers in zip(*world["drawn"], strict=True):
        assert len(set(numbers)) == 4


def test_a_cell_costs_little_and_so_does_a_failure(world):
    """Some 10 ms and 0.5 s. Touching memory or collecting garbage in each would cost far more."""
    world.execute("pass")
    start = time.monotonic()
    for _ in range(40):
        world.execute("pass")
    assert time.monotonic() - start < 8
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(naranhi.RankError, match="rank 2 raised ZeroDivisionError"):
            world.execute("if rank == 2:\n    1 / 0\ndist.barrier()")
    assert time.monotonic() - start < 6


def test_names_at_hand_and_names_kept(world, capsys):
    world.execute("kept = (rank, world_size, str(device), dist.get_rank(), torch.__name__)")
    world.execute("print(kept[0] == kept[3], kept[1:3], kept[4])")
    assert capsys.readouterr().out == "[ranks 0-3] True (4, 'cpu') torch\n"
    assert [value[0] for value in world["kept"]] == [0, 1, 2, 3]


def test_run_returns_results_in_rank_order(world, capsys):
    def add(a, *, b):
        import torch.distributed as dist

        print("adding")
        return a + b + dist.get_rank()

    assert world.run(add, 10, b=5) == [15, 16, 17, 18]
    assert capsys.readouterr().out == "[ranks 0-3] adding\n"


GPU_OF_A_RANK = """
import torch.serialization as of
of.register_package(0, lambda storage: f"cuda:{rank}", lambda storage, location: None);
x = {"weight": torch.full((2,), float(rank))}
"""


def test_tensors_come_to_the_cpu_of_the_notebook(world):
    """It may see other GPUs than the ranks, or none."""
    world.execute(GPU_OF_A_RANK)
    try:
        twos = world.run(lambda: {"weight": torch.full((2,), float(os.environ["RANK"]))})
        for values in (world["x"], twos):
            assert [x["weight"].tolist() for x in values] == [2 * [float(r)] for r in range(4)]
            assert {x["weight"].device.type for x in values} == {"cpu"}
    finally:
        world.execute("of._package_registry.pop(0)")


NEW = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
NEW += ["float4_e2m1fn_x2", "uint16", "uint32", "uint64", "complex32"]


@pytest.mark.parametrize("dtype", NEW)
def test_tensors_whose_own_pickles_cannot_be_read(world, dtype):
    one = torch.arange(16, dtype=torch.uint8).view(getattr(torch, dtype))
    zero = torch.zeros((), dtype=one.dtype)
    parameter = torch.nn.Parameter(one.view(torch.uint8), requires_grad=False)
    sent = {"one": one, "zero": zero, "parameter": parameter}
    for got in world.run(lambda sent: {**sent, "dtype": sent["one"].dtype}, sent):
        assert got["dtype"] == got["one"].dtype == got["zero"].dtype == one.dtype
        assert torch.equal(got["one"].view(torch.uint8), parameter) and got["zero"].dim() == 0
        assert isinstance(got["parameter"], torch.nn.Parameter)
    world.execute(f"odd = torch.arange(16, dtype=torch.uint8).view(torch.{dtype})[rank:rank + 1]")
    assert [odd.dtype for odd in world["odd"]] == 4 * [one.dtype]


def test_a_call_from_another_thread_is_refused_while_the_ranks_are_busy(world):
    results = []
    world.execute("kept = rank")
    thread = threading.Thread(target=lambda: results.append(world.run(time.sleep, 1.5)))
    thread.start()
    time.sleep(0.5)
    with pytest.raises(naranhi.RankError, match="busy with a call from another thread"):
        world["kept"]
    thread.join(30)
    assert results == [[None] * 4]
    assert world["kept"] == [0, 1, 2, 3]


def test_what_a_rank_writes_to_stderr_is_labelled(world, capsys):
    world.execute("import sys\nif rank == 1:\n    print('careful', file=sys.stderr)")
    assert capsys.readouterr().err == "[rank 1] careful\n"


def test_every_socket_listens_on_loopback(world):
    world.execute("pair = dist.new_group([0, 1])\ndist.all_reduce(torch.ones(1))\ndist.barrier()")
    listening = subprocess.run(
        ["ss", "-ltnpH"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    ours = set(map(str, [*_pids(world), *_notebook()]))
    addresses = [line.split()[3] for line in listening if any(f"pid={p}," in line for p in ours)]
    assert len(addresses) >= 5
    assert {a.rsplit(":", 1)[0] for a in addresses} <= {"127.0.0.1", "[::1]"}


def _pids(world):
    return [who[1] for who in world._ranks.lifelines._connections]


def _notebook():
    import os

    return [os.getpid()]


@pytest.mark.parametrize("ranks", [0, -1])
def test_too_few_ranks(ranks):
    with pytest.raises(ValueError, match=f"at least one rank, not {ranks}"):
        World(ranks)


@pytest.mark.parametrize("ranks", ["4", 2.0, None, True])
def test_ranks_that_are_no_whole_number(ranks):
    with pytest.raises(TypeError, match="a whole number of ranks"):
        World(ranks)


def test_more_ranks_than_gpus():
    import torch

    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"one GPU for each of the {count + 1} ranks"):
        World(count + 1, backend="nccl")


def test_a_backend_that_does_not_exist():
    with pytest.raises(ValueError, match="backend 'nccl2' does not exist here"):
        World(2, backend="nccl2")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_other_numbers_of_ranks(ranks, capsys):
    world = World(ranks)
    world.execute("x = torch.ones(1)\ndist.all_reduce(x)\nprint(int(x))")
    world.close()
    label = "rank 0" if ranks == 1 else f"ranks 0-{ranks - 1}"
    assert capsys.readouterr().out == f"[{label}] {ranks}\n"


def test_a_world_closed_says_so():
    world = World(1)
    world.close()
    world.close()
    with pytest.raises(naranhi.RankError, match="this World is closed"):
        world.execute("1")
