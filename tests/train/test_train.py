"""`torchrun -m naranhi.train` for real: its losses, its log, and its ends.

Where a launcher has no part in what is tested, ranks are forked (`forked.py`).
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_gpt2
from forked import Forked
from kernels import stop, wait_until

from naranhi import schedules, train
from naranhi.distributed import processes
from naranhi.train import cli, trainer
from naranhi.train.log import Log
from naranhi.train.options import RATE
from naranhi.train.schedule import schedule_names, takes_chunks


def command(ranks, *options):
    """--log-file, because torchrun takes --log for one of its own options."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "naranhi.train",
        *map(str, options),
    ]


def run(ranks, *options):
    return subprocess.run(
        command(ranks, *options),
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def forked():
    """`forked(ranks, *options)`: as `run`, without its launcher."""
    imported = "datasets", "torch._dynamo", "transformers.models.gpt2.modeling_gpt2"
    with Forked(*imported) as server:
        yield lambda ranks, *options: server.run(ranks, "naranhi.train", *options)


def read(log):
    """Each line is one whole object."""
    text = log.read_text()
    assert text.endswith("\n")
    entries = [json.loads(line) for line in text.splitlines()]
    assert [entry["step"] for entry in entries] == list(range(len(entries)))
    return entries


def told(stderr):
    """Our own lines, without torchrun's."""
    return [line for line in stderr.splitlines() if line.startswith("naranhi.train:")]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Options, for batches that are small as well."""
    return *small_gpt2.write(tmp_path_factory.mktemp("small")), "--microbatches", 2, "--batch", 4


@pytest.mark.slow
def test_any_number_of_ranks_gives_the_same_losses(tmp_path, forked):
    runs = {
        1: ("--schedule", "inter_layer", "--recompute"),
        2: ("--dp", 2),
        4: ("--schedule", "gpipe", "--balance", "4,3,3,4"),
    }
    losses, steps = {}, 12
    for ranks, options in runs.items():
        log = tmp_path / f"{ranks}.jsonl"
        start = run if ranks == 2 else forked
        done = start(ranks, *options, "--microbatches", 4, "--steps", steps, "--log-file", log)
        assert done.returncode == 0, done.stderr
        entries = read(log)
        losses[ranks] = [entry["loss"] for entry in entries]
        found = re.findall(r"^step: (\d+), loss: ([\d.]+)$", done.stdout, re.MULTILINE)
        shown = [*range(0, steps - 1, 10), steps - 1]
        assert found == [(str(step), f"{losses[ranks][step]:.4f}") for step in shown]
        assert f"{steps} steps in " in done.stdout
        entropy = float(re.search(r"unigram entropy ([\d.]+) nats", done.stdout)[1])
        for entry in entries:
            assert set(entry) == {"step", "loss", "tokens", "padding", "seconds"}
            assert entry["tokens"] > 0 <= entry["padding"]
            assert entry["seconds"] > 0
    assert losses[1] == pytest.approx(losses[2], abs=1e-6)
    assert losses[1] == pytest.approx(losses[4], abs=1e-6)
    assert losses[1][0] > entropy + 0.5


def test_losses_fall(small, tmp_path, forked):
    """By far below what a model knows that knows how often each word is: the unigram entropy."""
    options = *small[2:], "--dp", 2, "--steps", 40, "--log-file", tmp_path / "log.jsonl"
    done = forked(2, *options)
    assert done.returncode == 0, done.stderr
    entropy = float(re.search(r"unigram entropy ([\d.]+) nats", done.stdout)[1])
    losses = [entry["loss"] for entry in read(tmp_path / "log.jsonl")]
    assert losses[0] > entropy + 0.5
    assert sum(losses[-10:]) / 10 < entropy - 0.5


def test_a_full_disk_ends_the_log_and_not_the_training(small, forked):
    """Trained weights, untied, and a corpus in a file, too."""
    done = forked(1, *small, "--steps", 12, "--untied", "--log-file", "/dev/full")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the log /dev/full ends here (No space left on device)") == 1
    assert "(4 repeated ones left out)" in done.stdout
    assert "16 passages" in done.stdout
    assert "step: 11, loss: " in done.stdout


def test_a_loss_that_is_no_number_is_told(small, tmp_path, forked):
    done = forked(1, *small, "--lr", 1e30, "--log-file", tmp_path / "log.jsonl")
    assert done.returncode != 0
    (line,) = told(done.stderr)
    assert re.fullmatch(r"naranhi.train: error: the loss of step \d is nan: .*--lr.*", line)
    assert len(read(tmp_path / "log.jsonl")) >= 1


@pytest.fixture
def endless(small, tmp_path):
    """A training on two ranks that has written some lines: its launcher, its log, its ranks."""
    log = tmp_path / "log.jsonl"
    launcher = subprocess.Popen(
        command(2, *small, "--steps", 10**6, "--silence", 4, "--log-file", log),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        end = time.monotonic() + 60
        while not log.exists() or log.read_bytes().count(b"\n") < 20:
            assert launcher.poll() is None, launcher.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        yield launcher, log, pids_of_ranks(launcher)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


def pids_of_ranks(launcher):
    """In rank order."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    pids = {}
    for pid in children.split():
        entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
        pids.update({int(entry[5:]): int(pid) for entry in entries if entry.startswith("RANK=")})
    return [pids[rank] for rank in sorted(pids)]


def test_ctrl_c_leaves_a_readable_log_and_no_flood(endless):
    launcher, log, _ = endless
    os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does
    _, stderr = launcher.communicate(timeout=30)
    assert len(read(log)) >= 20
    assert "naranhi" not in re.sub(r"Sending process.*", "", stderr)
    assert stderr.count("Traceback") == 1, "the launcher's own"
    assert "SignalException" in stderr


def test_ctrl_c_ends_a_rank_that_is_stopped_as_well(endless):
    launcher, log, pids = endless
    stop(pids[1])
    start = time.monotonic()
    os.killpg(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=60)
    assert time.monotonic() - start < 15
    assert not Path(f"/proc/{pids[1]}").exists()
    assert len(read(log)) >= 20


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_blamed_by_all_and_leaves_a_readable_log(endless, killed):
    launcher, log, pids = endless
    os.kill(pids[killed], signal.SIGKILL)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert len(read(log)) >= 20
    root = stderr[stderr.index("Root Cause") :]
    assert re.search(rf"rank +: {killed} ", root) and "Signal 9 (SIGKILL)" in root
    assert "naranhi/train/" not in stderr, "no stack of ours"
    for line in told(stderr):  # none, when the launcher was faster
        assert line.startswith(
            f"naranhi.train: rank {1 - killed} ends, because it has lost rank {killed}: "
        )


def test_what_several_ranks_say_does_not_run_together(monkeypatch):
    """Each line is one write, also where torchrun starts Python unbuffered (`-u`)."""
    written = []

    class Terminal(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            written.append(bytes(data))
            return len(data)

    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(Terminal(), write_through=True))
    monkeypatch.setattr(cli, "sleep", lambda seconds: None)
    monkeypatch.setattr(cli.os, "_exit", lambda code: None)
    cli.end("rank 3 ends", SimpleNamespace(kill_stopped=lambda: None))
    assert written == [b"naranhi.train: rank 3 ends\n"]


def test_a_stopped_rank_is_named_and_the_training_ends(endless):
    launcher, log, pids = endless
    stop(pids[1])
    start = time.monotonic()
    _, stderr = launcher.communicate(timeout=100)
    assert time.monotonic() - start < 4 + 15
    assert len(read(log)) >= 20
    first = told(stderr)[0]
    assert first.startswith("naranhi.train: rank 0 ends the training: rank 1 on ")
    assert f"was silent for 4 s: its process {pids[1]} is stopped" in first
    assert re.search(r"rank +: 1 ", stderr[stderr.index("Root Cause") :])


def test_a_silent_store_is_blamed_on_the_launcher_that_keeps_it(endless):
    launcher, _, pids = endless
    os.kill(launcher.pid, signal.SIGSTOP)
    end = time.monotonic() + 60
    while not all(map(processes.is_gone, pids)):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(launcher.pid, signal.SIGCONT)
    _, stderr = launcher.communicate(timeout=60)
    lines = [line for line in told(stderr) if "ends the training" in line]
    assert lines
    keeper = r"the store of the ranks at 127\.0\.0\.1:\d+, which torchrun keeps,"
    for line in lines:
        assert re.search(
            rf"{keeper} was silent for 4 s: its process {launcher.pid} is stopped", line
        )


def test_ranks_end_with_their_launcher(endless):
    launcher, log, pids = endless
    for pid in pids:  # none of them can notice by itself, or be ended by another
        stop(pid)
    os.kill(launcher.pid, signal.SIGKILL)
    try:
        wait_until(lambda: all(map(processes.is_gone, pids)), 10)
    finally:
        for pid in pids:
            processes.kill(pid)
    assert len(read(log)) >= 20


def test_without_a_network_and_a_name(needs, small):
    """With what --help advises; then what the ranks open themselves needs no name either."""
    needs("unshare", "util-linux", as_root=True)
    needs("ip", "iproute2", as_root=True)
    launch = command(2, *small, "--steps", 1)
    launch.insert(launch.index("--standalone"), "--local-addr=127.0.0.1")
    setup = 'hostname nowhere && ip link set lo up && exec "$@"'
    done = subprocess.run(
        ["unshare", "--net", "--uts", "sh", "-c", setup, "sh", *launch],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert "1 steps in" in done.stdout, done.stderr
    assert "Unable to resolve hostname" not in done.stderr


@pytest.mark.parametrize(
    "ranks, options, message",
    [
        (2, ("--corpus", "nowhere.json"), "the corpus nowhere.json does not exist"),
        (2, ("--balance", "4,3,3,5"), "the balance [4, 3, 3, 5] divides 15 layers into 4 stages"),
        (1, ("--steps", "none"), "argument --steps: 'none' is no whole number"),
        (
            2,
            ("--dp", 2, "--pp", 4),
            "a mesh of data 2 x pipeline 4 x tensor 1 has 8 ranks, the world has 2",
        ),
    ],
)
def test_a_mistake_is_told_once_and_every_rank_leaves(forked, ranks, options, message):
    done = (run if "--corpus" in options else forked)(ranks, *options)
    assert done.returncode != 0
    assert "step:" not in done.stdout
    (line,) = told(done.stderr)
    assert line.startswith(f"naranhi.train: error: {message}")
    assert "naranhi/train/" not in done.stderr, "no stack of ours"


# --- without a launcher --------------------------------------------------------------------------


def test_without_a_launcher_it_says_how_to_start():
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-m", "naranhi.train"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "torchrun --standalone" in done.stderr


def test_help_is_complete(capsys):
    with pytest.raises(SystemExit) as ended:
        train.parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for option in (
        "model",
        "corpus",
        "schedule",
        "balance",
        "microbatches",
        "batch",
        "steps",
        "lr",
        "seed",
        "dropout",
        "untied",
        "recompute",
        "log-file",
        "log",
        "dp",
        "pp",
        "tp",
        "cp",
        "ep",
        "experts",
        "top-k",
        "data-parallel",
        "sequence-parallel",
        "context-parallel",
        "expert-parallel",
        "silence",
    ):
        assert f"--{option}" in text
    assert "With torchrun --max-restarts, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text


def test_defaults():
    options = train.parse([])
    assert (options.schedule, options.microbatches, options.batch, options.steps) == (
        "gpipe",
        4,
        8,
        300,
    )
    assert (options.dp, options.pp, options.tp, options.cp, options.ep) == (1, None, 1, 1, 1)
    assert options.experts is options.top_k is None
    assert RATE["trained"] == 3e-5
    assert train.parse(["--log", "a"]).log == train.parse(["--log-file", "a"]).log == "a"
    assert train.parse(["--balance", "4,3,3,4"]).balance == [4, 3, 3, 4]


@pytest.mark.parametrize("name", ["one_f_one_b", "1F1B", "1f1b"])
def test_a_schedule_may_be_named_as_torch_does(name):
    assert train.parse(["--schedule", name]).schedule == "one_f_one_b"


@pytest.mark.parametrize(
    "old, new",
    [
        ("--data", "--dp"),
        ("--tensor", "--tp"),
        ("--pipeline", "--pp"),
        ("--rate", "--lr"),
        ("--sequence", "--sequence-parallel"),
    ],
)
@pytest.mark.parametrize("value", [[], ["2"]])
def test_an_old_name_of_an_option_gives_the_new_one(old, new, value):
    with pytest.raises(train.UsageError, match=f"{old} is called {new} now"):
        train.parse([old, *value])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--schedule", "gpype"],
        ["--balance", "4,,3"],
        ["--balance", "4,0"],
        ["--microbatches", "0"],
        ["--batch", "-8"],
        ["--steps", "1.5"],
        ["--lr", "0"],
        ["--lr", "nan"],
        ["--lr", "fast"],
        ["--lr", "inf"],
        ["--seed", "x"],
        ["--dropout", "1"],
        ["--dp", "0"],
        ["--pp", "0"],
        ["--tp", "two"],
        ["--silence", "0"],
        ["--unknown"],
        ["--step", "3"],
        ["more"],
    ],
)
def test_options_that_make_no_sense_are_refused(arguments):
    with pytest.raises(train.UsageError, match=re.escape(arguments[0].lstrip("-"))) as refused:
        train.parse(arguments)
    assert " _" not in str(refused.value), "a name of our code"


def test_a_batch_that_the_micro_batches_do_not_divide_is_refused():
    for options, shares in [
        (["--microbatches", "3"], "3 micro-batches of one size"),
        (["--dp", "4"], "4 shares of 4 micro-batches of one size"),
    ]:
        with pytest.raises(train.UsageError, match=f"--batch 8 cannot be divided into {shares}"):
            trainer.build_model_and_data(train.parse(options))


def test_schedules_are_found_by_their_arguments(monkeypatch):
    def mine(stages, microbatches, more=1):
        return schedules.gpipe(stages, microbatches)

    def other(stages, microbatches, rows):
        return schedules.interleaved(stages, microbatches, rows)

    def chunked(stages, microbatches, chunks, more=1):
        return schedules.interleaved(stages, microbatches, chunks)

    assert set(schedule_names()) == {
        "gpipe",
        "inter_layer",
        "interleaved",
        "one_f_one_b",
        "zero_bubble_h1",
        "zero_bubble_h2",
        "zero_bubble_v",
        "dualpipe_v",
    }
    for function in (mine, other, chunked):
        monkeypatch.setattr(schedules, function.__name__, function, raising=False)
    monkeypatch.setattr(schedules, "__all__", ["mine", "other", "chunked"])
    assert list(schedule_names()) == ["mine", "chunked"]
    assert not takes_chunks("mine") and takes_chunks("chunked")


# --- the log -------------------------------------------------------------------------------------


LOGGING = """
import resource, sys
from naranhi.train.log import Log
resource.setrlimit(resource.RLIMIT_FSIZE, (110, 110))
with Log(sys.argv[1]) as log:
    for step in range(20):
        log.write(step=step, loss=1.5)
"""


def test_a_line_without_room_is_not_begun(tmp_path):
    """A limit on the file's size stands in for the end of the disk: some of the line has room."""
    path = tmp_path / "log.jsonl"
    done = subprocess.run([sys.executable, "-c", LOGGING, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 110 % len('{"step": 0, "loss": 1.5}\n') != 0, "or this tests nothing"
    assert len(read(path)) == 4
    assert done.stderr.count(f"the log {path} ends here") == 1


def test_a_log_replaces_what_was_there(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("an older log\n" * 9)
    log = Log(path)
    log.write(step=0, loss=1.5)
    assert read(path) == [{"step": 0, "loss": 1.5}], "at once, not when it is closed"
    log.close()
    with pytest.raises(ValueError, match="JSON"), Log(path) as log:
        log.write(step=0, loss=float("nan"))
    assert path.read_text() == ""


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Log(tmp_path / "nowhere" / "log.jsonl")
    with Log(None) as log:
        log.write(step=0)


LATE = """
import os, signal
from naranhi.train import cli

def train(*arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)

cli.train = train
cli.main(["--silence", "4"])
"""


def test_a_rank_that_stops_after_its_last_step_is_named(tmp_path):
    """Nobody watched from there on, and the others waited for half an hour."""
    (tmp_path / "late.py").write_text(LATE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "--local-addr=127.0.0.1", str(tmp_path / "late.py")],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode != 0
    assert "rank 0 ends the training: rank 1 on " in told(done.stderr)[0]
