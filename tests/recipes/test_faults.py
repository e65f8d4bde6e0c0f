"""Each fault of `faults.py` ends in time, a tool names the rank, and no process is left.

The faults of two hosts are in tests/cluster/test_faults_on_two_hosts.py.
"""

import json
import re
import socket
from pathlib import Path
from statistics import median

import pytest
import slow_error_file
from faulty_runs import RECIPES, SCRIPT, THREE, TORCHRUN, Run, wait_for

pytestmark = pytest.mark.slow

DEADLINE = 2.0
HANG = ["absent-rank", "other-order", "other-shape", "sends", "frozen"]
ALL_REDUCE = "gloo:all_reduce"
STEP = ["all_reduce", "step"]  # where a rank is that takes a healthy step


def torchrun(folder, *faults, **environment):
    environment = {"GLOO_SOCKET_IFNAME": "lo", **environment}
    return Run(folder, *TORCHRUN, *THREE, *SCRIPT, *faults, **environment)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run with all faults that hang, and the slow rank; and the states of its ranks."""
    # Were it frozen at the end, the launcher would end it before it is woken.
    faults = ["slow-rank", "frozen", *HANG[:-1]]
    with torchrun(tmp_path_factory.mktemp("plain"), *faults) as run:
        wait_for(lambda: "stopped" in run.states().values(), run)
        run.when_frozen = run.states()
        run.code = run.end(8 * DEADLINE + 20)
        yield run


@pytest.fixture(scope="module")
def detail(tmp_path_factory):
    """The same faults where torch checks each collective; at its end a rank is killed.

    The others still write their errors when torchrun ends them, which must not read half a file.
    """
    folder = tmp_path_factory.mktemp("detail")
    script = [*SCRIPT[:-1], Path(slow_error_file.__file__), SCRIPT[-1]]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    with Run(folder, *TORCHRUN, *THREE, *script, *HANG, "killed", **environment) as run:
        run.code = run.end(8 * DEADLINE + 20)
        yield run


@pytest.fixture(scope="module")
def crash(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash")
    (folder / "checkpoint.pt").symlink_to("/dev/full")
    with torchrun(folder, "out-of-memory", "full-disk", "exception") as run:
        run.code = run.end(3 * DEADLINE + 20)
        yield run


def stack(text):
    """The torch function and the script's function in which a rank was at half of the deadline."""
    frames = re.findall(r'File ".*?(\w+)\.py", line \d+ in (\w+)', text)
    script = [function for file, function in frames if file == "faults"][:1]
    return [*(function for file, function in frames[:1] if file != "faults"), *script]


def last_collective(text):
    return re.search("last collective: ?(.*)", text)[1]


@pytest.mark.parametrize("fault", HANG)
def test_a_deadline_ends_it_and_names_nobody(plain, fault):
    errors = re.findall("RuntimeError: .*", "".join(plain.said(fault).values()))
    assert any("Timed out waiting 2000ms" in error for error in errors), errors
    assert not any(re.search("[Rr]anks? [0-9]", error) for error in errors)
    assert plain.code == 1


def test_another_shape_gives_a_wrong_sum_without_an_error(plain):
    said = plain.said("other-shape")
    for rank in (0, 2):
        assert "sum of ones: [2.0, 2.0, 2.0, 2.0]" in said[rank], "of three ones"
        assert "Error" not in said[rank]
    assert "Timed out" in said[1]


@pytest.mark.parametrize(
    "fault, stacks",
    [
        ("absent-rank", [STEP, ["absent_rank"], STEP]),
        (
            "other-order",
            [["all_reduce", "step"], ["broadcast", "other_order"], ["all_reduce", "step"]],
        ),
        ("other-shape", [[], STEP, []]),
        ("sends", [["send", "sends"]] * 3),
        ("frozen", [STEP, ["frozen"], STEP]),
    ],
)
def test_stacks_name_the_rank(plain, fault, stacks):
    assert [stack(text) for text in plain.said(fault).values()] == stacks


@pytest.mark.parametrize(
    "fault, called",
    [
        ("absent-rank", [ALL_REDUCE, "", ALL_REDUCE]),
        ("other-order", [ALL_REDUCE, "gloo:broadcast", ALL_REDUCE]),
        ("sends", ["", "", ""]),
    ],
)
def test_the_flight_recorder_names_the_rank(plain, fault, called):
    assert [last_collective(text) for text in plain.said(fault).values()] == called


def test_a_frozen_rank_is_stopped(plain):
    assert [rank for rank, state in plain.when_frozen.items() if state == "stopped"] == [1]


def test_the_slow_rank_is_the_one_that_waits_least(plain):
    waits, loads = {}, {}
    for rank, text in plain.said("slow-rank").items():
        steps = [line.split()[2:] for line in text.splitlines() if line.startswith("step ")]
        clocks = [[float(clock) for clock in step] for step in steps]
        assert len(clocks) == 60
        loads[rank] = median(clock[1] - clock[0] for clock in clocks)
        waits[rank] = median(clock[3] - clock[2] for clock in clocks)
    assert min(waits, key=waits.get) == 1
    assert loads[1] > 2 * max(loads[0], loads[2])


@pytest.mark.parametrize("fault", ["absent-rank", "frozen"])
def test_detail_names_a_rank_that_does_not_come(detail, fault):
    said = detail.said(fault)
    assert "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms" in said[0]
    assert "check rank 0 logs for faulty rank" in said[2]


@pytest.mark.parametrize(
    "fault, differ", [("other-order", "ALLREDUCEvs BROADCAST"), ("other-shape", "shapes: 4vs 6")]
)
def test_detail_names_both_collectives(detail, fault, differ):
    said = detail.said(fault)[0]
    assert "Rank 0 is running collective" in said
    assert "but Rank 1 is running collective" in said
    assert differ in said


def test_detail_does_not_compare_sends(detail):
    assert "Timed out waiting 2000ms for send" in "".join(detail.said("sends").values())


def test_a_killed_rank_is_named_by_its_exit_code_only(detail):
    assert detail.code == 1
    codes = detail.exit_codes()
    assert codes[1] == -9
    assert {codes[0], codes[2]} <= {1, -15}
    assert detail.said("killed")[1] == ""
    files = detail.folder.glob("logs/*/attempt_0/*/error.json")
    assert {int(file.parent.name) for file in files if json.loads(file.read_text())} <= {0, 2}


def test_an_exception_is_the_root_cause_and_in_the_file_of_its_rank(crash):
    assert crash.code == 1
    cause = crash.printed().partition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank +: 1 ", cause)
    assert "ValueError: row 1741 has no targets" in cause
    [file] = crash.folder.glob("logs/*/attempt_0/1/error.json")
    error = json.loads(file.read_text())["message"]["message"]
    assert error == "ValueError: row 1741 has no targets"


def test_out_of_memory_says_how_much_was_asked_for(crash):
    said = crash.said("out-of-memory")
    assert "can't allocate memory: you tried to allocate 34359738368 bytes" in said[1]
    assert "allocate" not in said[0] + said[2]


def test_a_full_disk_is_not_named(crash):
    said = crash.said("full-disk")[1]
    assert re.search(r"RuntimeError: .*unexpected pos \d+ vs \d+", said)
    assert not re.search("space|disk|full", said.partition("RuntimeError")[2])


@pytest.mark.parametrize(
    "name, word",
    [("trainer-0.invalid", "Name or service not known"), ("127.0.0.1", "timed out after 3000ms")],
)
def test_a_wrong_address(tmp_path, name, word):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and nobody listens
        port = silent.getsockname()[1]
        nodes = ["--nnodes=2", "--node-rank=1", f"--master-addr={name}", f"--master-port={port}"]
        command = [*TORCHRUN, *nodes, "--rdzv-conf=timeout=3", *SCRIPT, "exception"]
        with Run(tmp_path, *command) as run:
            assert run.end(60) == 1
            assert run.left() == []
            printed = run.printed()
    assert word in printed
    last = "The client socket has timed out after 3000ms while trying to connect to "
    assert printed.splitlines()[-1].endswith(f"{last}({name}, {port}).")


def test_an_absent_node_is_counted(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
    with Run(tmp_path, *TORCHRUN, *nodes, "--rdzv-conf=timeout=3", *SCRIPT, "exception") as run:
        assert run.end(60) == 1
        assert run.left() == []
        assert "1/2 clients joined" in run.printed().splitlines()[-1]


def test_an_unknown_fault_is_refused(tmp_path):
    with Run(tmp_path, *TORCHRUN[:1], RECIPES / "faults.py", "cosmic-ray") as run:
        assert run.end(10) == 2
        assert "invalid choice: 'cosmic-ray' (choose from" in run.printed()


def test_nothing_is_left(plain, detail, crash):
    assert [run.left() for run in (plain, detail, crash)] == [[], [], []]
