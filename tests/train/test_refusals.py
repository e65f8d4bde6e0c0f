"""A training that is refused: nothing of it stays, and no rank waits for another."""

import gc
import io
import os
import subprocess
import sys

import pytest
import small_gpt2
import torch
import torch.distributed as dist

from naranhi import train
from naranhi.checkpoint.storage import Storage
from naranhi.pipeline import preparation
from naranhi.train import trainer
from naranhi.train.cli import say_aloud
from naranhi.train.saves import Saves


def left_by(options, times):
    """The message, and how many groups and descriptors there are more after each refusal."""

    def open_ones():
        gc.collect()
        return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))

    for _ in range(times):
        before = open_ones()  # the first may import something
        with pytest.raises(train.UsageError) as error:
            train.losses(options)
    after = open_ones()
    return str(error.value), [now - then for now, then in zip(after, before, strict=True)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dp 2 --batch 6", "--batch 6 cannot be divided"),
        ("--pp 2 --balance 3,3", "balance"),
        ("--pp 2 --schedule dualpipe_v --microbatches 1", "micro-batches"),
    ],
)
def test_a_refused_training_leaves_no_groups(eight, options, message):
    for said, (groups, descriptors) in eight(2, left_by, options, 2):
        assert message in said
        assert groups == 0
        assert descriptors <= 0


def unseen_by_one_rank(folder):
    options = train.parse(["--save", folder, "--steps", "1"])
    original = Storage.steps

    def steps(storage):
        raise PermissionError(13, "Permission denied", folder)

    if dist.get_rank():
        Storage.steps = steps
    try:
        with pytest.raises(train.UsageError) as error:
            Saves(options, {})
    finally:
        Storage.steps = original
    return str(error.value)


def test_a_folder_that_one_rank_cannot_list_is_told_to_all(eight, tmp_path):
    said = eight(2, unseen_by_one_rank, str(tmp_path / "runs"))
    assert said[0] == said[1]
    assert "on rank 1: [Errno 13] Permission denied" in said[0]


def devices_of_the_model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "device_of", lambda: torch.device("meta"))  # in place of a GPU
        patch.setattr(preparation, "check_values", lambda *_: None)
        with train.Training(train.parse(["--steps", "1"])) as training:
            return {param.device.type for param in training.pipeline.parameters()}


def test_the_model_is_on_the_device_of_the_group(eight):
    assert eight(1, devices_of_the_model) == [{"meta"}]


@pytest.mark.parametrize(
    ("option", "name", "why"),
    [
        ("--save", "a file/runs", "[Errno 20] Not a directory"),
        ("--log-file", "nowhere/log", "[Errno 2] No such file or directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_by_its_options_name(
    eight, tmp_path, option, name, why
):
    (tmp_path / "a file").touch()
    arguments = ["--steps", "1", option, str(tmp_path / name)]
    assert f"{option}: {why}: '{tmp_path / name}'" in eight(1, refusal, arguments)[0]


def refusal(arguments):
    with pytest.raises(train.UsageError) as error:
        train.cli.train(train.parse(arguments))
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--save", ""], "argument --save: the value is empty; name a path"),
        (["--log-file", ""], "the value is empty; name a path"),
        (["--steps", "9" * 20], "argument --steps: 9{20} is more than 2,147,483,647"),
        (["--lr", "1e300"], "'1e300' is not a number above 0 that fits in fp32"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, words):
    """An empty path is what a variable of a script says that is not set."""
    with pytest.raises(train.UsageError, match=words):
        train.parse(arguments)


@pytest.mark.parametrize("option", ["--corpus corpus.txt", "--config model", "--model model"])
def test_a_log_does_not_replace_what_is_read(eight, tmp_path, option):
    small_gpt2.write(tmp_path / "model")
    (tmp_path / "corpus.txt").write_text("One.\n\nTwo.")
    log = {"--corpus": "corpus.txt"}.get(option.split()[0], "model/config.json")
    before = (tmp_path / log).read_bytes()
    name, path = option.split()
    options = f"{name} {tmp_path / path} --log-file {tmp_path / log} --steps 1"
    for said, _ in eight(2, left_by, options, 1):
        assert f"--log-file {tmp_path / log} is a file of {name}: name another one" in said
    assert (tmp_path / log).read_bytes() == before


def test_a_rate_is_one_that_adam_can_use():
    assert train.parse(["--lr", "1e37"]).lr == 1e37
    with pytest.raises(train.UsageError, match=r"'1e38' is more than 1e\+37, too much for Adam"):
        train.parse(["--lr", "1e38"])


def about(options):
    with train.Training(train.parse(options)) as training:
        return training.about


def test_passages_that_are_cut_are_told(eight, tmp_path):
    small_gpt2.write(tmp_path / "model")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(["word " * 500, "A few words.", "other " * 500, "And more."]))
    options = ["--model", str(tmp_path / "model"), "--corpus", str(corpus), "--batch", "4"]
    [said] = eight(1, about, options)
    assert said.startswith("4 passages") and "(2 passages are cut at " in said


@pytest.mark.processes
def test_a_refused_rank_is_not_aborted_by_its_group():
    """Threads of gloo that are there while Python finalizes abort it now and then, by signal 6."""
    program = (
        "import atexit\n"
        "from pathlib import Path\n"
        "from naranhi.train.cli import main\n"
        "def threads():\n"
        "    for file in Path('/proc/self/task').glob('*/comm'):\n"
        "        print(file.read_text(), end='')\n"
        "atexit.register(threads)\n"
        "main(['--steps', '0'])\n"
    )
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | place | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
    )
    assert "no whole number of at least 1" in done.stderr
    assert "gloo" not in done.stdout
    assert done.returncode == 1


@pytest.mark.processes
def test_lines_that_nobody_reads_end_nothing():
    program = (
        "import sys\n"
        "from naranhi.train.cli import say_aloud\n"
        "for number in range(20_000):\n"
        "    say_aloud(f'step {number}')\n"
        "print('went on', file=sys.stderr)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "step 0\n"
        process.stdout.close()
        assert process.stderr.read() == "went on\n"
    assert process.returncode == 0


def test_names_that_stdout_cannot_encode_end_nothing(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say_aloud("the model is in 모델")
    assert raw.getvalue() == b"the model is in \\ubaa8\\ub378\n"
