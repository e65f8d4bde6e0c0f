"""`naranhi.train --save --resume`: killed at random, the losses of a run that never was."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import small_gpt2
import torch.distributed as dist
import trained

from naranhi import data, train
from naranhi.checkpoint import Checkpoints, storage
from naranhi.checkpoint.storage import Storage
from naranhi.train.log import Log

STEPS, KILLS = 36, 10


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    options = small_gpt2.write(tmp_path_factory.mktemp("small"))
    return [*options, "--microbatches", "2", "--batch", "4", "--dropout", "0.1"]


def losses_of(arguments, log=None):
    """On a rank: the losses of a training; what a user is told, if it is refused."""
    options = train.parse([*arguments, *(["--log-file", log] if log else [])])
    said = []
    try:
        losses = train.cli.train(options, say=said.append)
    except train.UsageError as error:
        return str(error)
    return losses, said if dist.get_rank() == 0 else None


def resumed(folder, *options):
    return ["--save", str(folder), "--save-every", "2", "--resume", *map(str, options)]


def test_resumed_on_the_same_ranks_to_the_bit_and_on_others_nearly(eight, small, tmp_path):
    """With dropout; then without, on other meshes, schedules and micro-batches."""
    folder, log = tmp_path / "run", tmp_path / "log.jsonl"
    mesh = ["--dp", "2", "--pp", "2"]
    whole = eight(4, losses_of, [*small, *mesh, "--steps", "5"])[0][0]
    losses = []
    for steps in 3, 5:
        options = [*small, *mesh, *resumed(folder, "--steps", steps, "--keep", 2)]
        answers = eight(4, losses_of, options, str(log))
        assert len({str(answer[0]) for answer in answers}) == 1
        losses += answers[0][0]
    assert losses == whole
    assert f"resumed from step 3 in {folder}" in answers[0][1][0]
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["loss"] for entry in entries] == whole, "the log goes on"
    assert Storage(folder).steps() == [4, 5]

    plain, folder = [*small, "--dropout", "0"], tmp_path / "plain"
    whole = eight(1, losses_of, [*plain, "--steps", "5"])[0][0]
    losses = []
    for steps, ranks, more in [
        (1, 4, ["--dp", 2, "--tp", 2, "--sequence-parallel"]),
        (3, 2, ["--schedule", "zero_bubble_h1"]),
        (4, 2, ["--schedule", "ZBVZeroBubble"]),  # embedding and head on one rank
        (5, 1, ["--microbatches", 1, "--recompute"]),
        (5, 1, []),  # nothing is left to do
    ]:
        options = [*plain, *map(str, more), *resumed(folder, "--steps", steps)]
        losses += eight(ranks, losses_of, options)[0][0]
    assert len(losses) == 5 and losses == pytest.approx(whole, abs=2e-6)


def test_a_schedule_that_cannot_be_is_refused_on_every_rank(eight, small):
    answers = eight(2, losses_of, [*small, "--schedule", "DualPipeV"])
    assert answers[0] == answers[1]
    assert "DualPipeV takes at least two micro-batches for each rank: 4 for 2" in answers[0]


def without_room(full, options):
    """What is told where the disk has no room for the checkpoint of a step."""
    room = storage.write

    def write(path, data):
        if path.parent.name == f"step-{full:08d}.part":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room(path, data)

    storage.write = write
    try:
        return losses_of(options)
    finally:
        storage.write = room


def test_the_step_that_is_not_saved_is_named(eight, small, tmp_path):
    """A save in the background fails while the next steps run, or after the last one."""
    for full in 2, 4:
        folder = tmp_path / str(full)
        options = [*small, "--steps", "4", "--save-every", "2", "--save", str(folder)]
        for told in eight(2, without_room, full, options):
            assert (
                told == f"step {full} is not saved: on rank 0: [Errno 28] No space left on device"
            )


def test_another_run_is_not_resumed(eight, small, tmp_path):
    """Other data, another vocabulary, another rate: named on every rank; the checkpoint stays."""
    folder = tmp_path / "run"
    base = [*small, "--steps", "2", "--save", str(folder)]
    assert len(eight(2, losses_of, base)[0][0]) == 2
    passages = [{"context": "Side by side the ranks compute, and none of them waits."}] * 4
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"data": [{"paragraphs": passages}]}))

    def told(*options):
        answers = eight(2, losses_of, [*small, *resumed(folder, "--steps", 4), *options])
        assert answers[0] == answers[1] and isinstance(answers[0], str)
        return answers[0]

    def another(name, was, now):
        return f"{folder} was saved with another {name} ({was}, now {now}): resume with what"

    assert told("--lr", "1e-4").startswith(another("--lr", 3e-5, 1e-4))
    assert told("--batch", "8").startswith(another("--batch", 4, 8))
    assert told("--seed", "1").startswith(another("--seed", 0, 1))
    assert told("--clip", "1").startswith(another("--clip", None, 1.0))
    assert told("--dropout", "0").startswith(another("--dropout", 0.1, 0.0))
    assert "was saved with another corpus, or tokenizer (" in told("--corpus", str(other))
    other = told("--untied")
    assert f"{folder} was saved by a run of another model: resume with the options that it" in other
    assert "(--model, --config, --experts, --untied)" in other
    first = "(its first is 0.wte.weight)"
    assert f"the checkpoint has no parameter 3.lm_head.weight {first}" in other
    vocabulary = small_gpt2.write(tmp_path, extra=8)
    assert "parameter 0.wte.weight has shape [" in told(*vocabulary[:2])
    begun = eight(2, losses_of, [*small, "--steps", "4", "--save", str(folder)])
    assert begun[0] == begun[1]
    assert begun[0].startswith(
        f"--save {folder} has checkpoints of a run already, up to step 2: --resume goes on with"
    )
    (tmp_path / "file").touch()
    refused = eight(2, losses_of, [*small, "--save", str(tmp_path / "file")])
    assert "File exists" in refused[0] and refused[0] == refused[1]
    again = eight(2, losses_of, [*small, *resumed(folder, "--steps", 3)])
    assert len(again[0][0]) == 1 and "resumed from step 2" in again[0][1][0]


def test_sequences_are_cut_to_a_multiple_that_the_positions_have(eight, tmp_path):
    """They are padded to multiples of 8, also the longest."""
    options = [*small_gpt2.write(tmp_path, positions=30), "--batch", "4", "--microbatches", "2"]
    assert len(eight(1, losses_of, [*options, "--steps", "3"])[0][0]) == 3
    options = [*small_gpt2.write(tmp_path, positions=7), "--batch", "4", "--microbatches", "2"]
    told = eight(1, losses_of, [*options, "--steps", "3"])[0]
    assert told == f"the model of {tmp_path} has 7 positions: it takes at least 8"


def saved_by_itself(folder, options):
    """Save the model of a training as another program would; and as naranhi.train once did."""
    with train.Training(train.parse(options)) as training:
        settings = {**training._saves.settings}
        del settings["model"]
        for name, state in ("own", {}), ("old", {"settings": settings}):
            with Checkpoints(folder / name) as checkpoints:
                checkpoints.save(2, training.pipeline, training.optimizer, **state)


def test_what_another_program_or_model_has_saved_is_not_resumed(eight, small, tmp_path):
    """Nor a model of the same shapes that computes otherwise; a run of an older version is."""
    eight(2, saved_by_itself, tmp_path, small)
    for told in eight(2, losses_of, [*small, *resumed(tmp_path / "own", "--steps", 3)]):
        assert f"step 2 in {tmp_path / 'own'} was not saved by naranhi.train: resume it" in told
    model = tmp_path / "model"
    shutil.copytree(small[1], model)
    config = json.loads((model / "config.json").read_text())
    config |= {"n_head": 4, "activation_function": "relu"}
    (model / "config.json").write_text(json.dumps(config))
    old = resumed(tmp_path / "old", "--steps", 3)
    losses, _ = eight(2, losses_of, [*small, *old])[0]
    assert len(losses) == 1
    for told in eight(2, losses_of, ["--model", str(model), *small[2:], *old, "--steps", "4"]):
        assert "was saved with another model (n_head 2, activation_function gelu_new, " in told
        assert ", now n_head 4, activation_function relu, " in told


def test_the_default_number_of_experts_of_a_token_may_be_given(eight, small, tmp_path):
    experts = [*small, "--dropout", "0", "--experts", "4"]
    folder = tmp_path / "run"
    for steps, more in (1, ["--top-k", "2"]), (2, []), (3, ["--top-k", "2"]):
        losses, _ = eight(1, losses_of, [*experts, *more, *resumed(folder, "--steps", steps)])[0]
        assert len(losses) == 1


def test_resume_goes_with_a_folder():
    with pytest.raises(train.UsageError, match="--resume goes with --save DIR"):
        train.parse(["--resume"])
    options = train.parse(["--save", "runs/a"])
    assert (options.save, options.save_every, options.keep) == ("runs/a", 100, 3)


def test_a_log_goes_on_from_a_step(tmp_path):
    """After the whole lines of earlier steps; a new one where there is none."""
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(4)]
    for text, start, left in [
        ("".join(lines), 2, 2),
        ("".join(lines), 4, 4),
        ("".join(lines)[:-5], 9, 3),
        ("", 3, 0),
        (lines[0] + "something else\n" + lines[1], 2, 1),
    ]:
        path.write_text(text)
        with Log(path, start) as log:
            log.write(step=start, loss=2.0)
        assert path.read_text() == "".join(lines[:left]) + f'{{"step": {start}, "loss": 2.0}}\n'
    with Log(tmp_path / "new.jsonl", 5) as log:
        log.write(step=5)
    assert (tmp_path / "new.jsonl").read_text() == '{"step": 5}\n'


def test_a_log_may_be_a_pipe():
    reader, writer = os.pipe()
    with Log(f"/dev/fd/{writer}") as log:
        log.write(step=0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert lines.read() == '{"step": 0}\n'


def test_killed_at_random_moments_it_ends_as_if_never_killed(small, tmp_path):
    files = whole, log = tmp_path / "whole.jsonl", tmp_path / "log.jsonl"
    arguments = [*small, "--steps", str(STEPS)]
    more = [*resumed(tmp_path / "run", "--keep", 2), "--save-every", "1"]
    options = [str(whole), str(log), KILLS, arguments, more]
    command = [sys.executable, trained.__file__, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resumed from step" in done.stdout
    # The steps of a life that was killed are done again, from its last checkpoint on.
    lines = json.loads(done.stdout.splitlines()[-1])
    assert len(lines) == KILLS and all(0 < count < STEPS for count in lines), lines
    entries = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert len(entries[0]) == len(entries[1]) == STEPS
    for expected, entry in zip(*entries, strict=True):
        assert {**expected, "seconds": 0} == {**entry, "seconds": 0}


def test_another_padding_token_is_refused_where_routers_see_it(eight, tmp_path):
    options = small_gpt2.write(tmp_path, extra=1)
    options += ["--batch", "4", "--microbatches", "2", "--experts", "2", "--steps", "2"]
    eight(1, losses_of, [*options, *resumed(tmp_path / "run")])
    tokenizer = data.tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    answer = eight(1, losses_of, [*options, *resumed(tmp_path / "run", "--steps", 3)])[0]
    assert "was saved with another padding token" in answer
