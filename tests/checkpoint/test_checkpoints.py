"""Checkpoints on ranks: what is committed and kept, and what is not."""

import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpointed import Run, made, numbers, refusal
from gloo_ranks import first_ranks
from torch import nn

from naranhi.checkpoint import Checkpoints, storage
from naranhi.checkpoint.boxes import Box
from naranhi.checkpoint.parts import Part
from naranhi.checkpoint.writing import Write


def life(folder):
    """Saves in the foreground and in the background, with a schedule, on three ranks."""
    made_of = made(3)
    if made_of is None:
        return None
    zero, optimizer = made_of
    group, answers = first_ranks(3), {}
    with Checkpoints(folder, keep=2, group=group) as checkpoints:
        assert checkpoints.steps() == []
        answers["nothing yet"] = refusal(lambda: checkpoints.load(zero, optimizer))
        checkpoints.save(1, zero, optimizer, note="one")
        before = numbers(zero, optimizer)
        write, changed = Write.run, threading.Event()
        Write.run = lambda *args: (changed.wait(), write(*args))  # no earlier than the next step
        checkpoints.save_async(2, zero, optimizer, note={"position": [2, 0.5], "of": torch.ones(2)})
        zero.model(torch.ones(1, 4)).sum().backward()
        zero.step(optimizer)  # meanwhile: the copy does not change
        after = numbers(zero, optimizer)
        assert after != before
        changed.set()
        checkpoints.wait()
        Write.run = write
        checkpoints.save(30, zero, optimizer)
        answers["steps"] = checkpoints.steps()
        saved = checkpoints.load(zero, optimizer, step=2)
        assert (saved.step, saved.skipped) == (2, {}) and numbers(zero, optimizer) == before
        assert saved.state["note"]["position"] == [2, 0.5]
        assert torch.equal(saved.state["note"]["of"], torch.ones(2))
        assert checkpoints.load(zero, optimizer).step == 30
        assert numbers(zero, optimizer) == after
        for step in 30, 29, -1, True, "x":
            answers[f"step {step}"] = refusal(lambda step=step: checkpoints.save(step, zero))
        answers["no such"] = refusal(lambda: checkpoints.load(zero, optimizer, step=7))
        checkpoints.save(31, zero)  # without an optimizer
        assert refusal(lambda: checkpoints.load(zero)) is None
        answers["optimizer"] = refusal(lambda: checkpoints.load(zero, optimizer))
        answers["differ"] = refusal(
            lambda: checkpoints.save(40, zero, optimizer, position=dist.get_rank())
        )
        answers["object"] = refusal(lambda: checkpoints.save(40, zero, note=Path("x")))
        answers["function"] = refusal(lambda: checkpoints.save(40, zero, note=lambda: None))
        with zero.gathered():
            answers["gathered"] = refusal(lambda: checkpoints.save(40, zero, optimizer))
        answers["other optimizer"] = refusal(
            lambda: checkpoints.save(40, zero, torch.optim.SGD(nn.Linear(1, 1).parameters()))
        )
        if dist.get_rank() == 1:  # not as the others have it
            optimizer.param_groups[0]["lr"] = 0.5
        answers["rates"] = refusal(lambda: checkpoints.save(40, zero, optimizer))
        optimizer.param_groups[0]["lr"] = 0.25
        piece = next(iter(optimizer.state))
        optimizer.state[piece]["shape"] = torch.ones(2, 3)
        answers["shape"] = refusal(lambda: checkpoints.save(40, zero, optimizer))
        del optimizer.state[piece]["shape"]
        with pytest.raises(ValueError, match="keep must be a whole number of at least 1"):
            Checkpoints(folder, keep=0, group=group)
        return answers


def test_the_life_of_checkpoints(five, tmp_path):
    folder = tmp_path / "runs" / "a"
    foreign = [
        "step-7",
        "step-00000001.bak",
        "step-00000003.old",
        "notes.txt",
        "rank-0-0123456789abcdef.pt",
    ]
    left_over = ["step-00000009.part", "step-00000003.deleting"]  # by saves that were killed
    for name in [*foreign, *left_over]:
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("precious")
    own = folder / "rank-1-0123456789abcdef.pt"  # of the user's, and no folder
    own.write_text("precious")
    first, *others = five.call(life, str(folder))[:3]
    assert others == [first, first], "the same on every rank"
    assert all((folder / name / "file").exists() for name in foreign) and own.exists()
    names = {path.name for path in folder.iterdir()} - {*foreign, own.name}
    assert names == {".lock", "step-00000030", "step-00000031"}
    assert first["steps"] == [2, 30], "the two newest"
    words = {
        "nothing yet": f"{folder} has no checkpoint: nothing was saved there, or a save was not "
        "finished",
        "step 30": f"{folder} has a checkpoint of step 30 already, and this is step 30: to go back "
        "to an earlier step, save into another folder",
        "step 29": "or delete the checkpoints from step 30 on",
        "step -1": "step must be a whole number of at least 0, not -1",
        "step True": "not True",
        "step x": "not 'x'",
        "no such": f"{folder} has no checkpoint of step 7: it has 2, 30, or a save was not "
        "finished",
        "optimizer": "the checkpoint was saved with no optimizer, and load was given AdamW with 1 "
        "parameter group; without an optimizer, load reads the model alone",
        "differ": "position differs between the ranks: save what is the same on all of them",
        "object": "which cannot be read safely from a file: save plain values and tensors",
        "function": "pickle",
        "gathered": "inside of a gathered() block: leave the block first",
        "other optimizer": "this optimizer does not work on the shards of this model",
        "rates": "the optimizer of rank 0 is AdamW with",
        "shape": "AdamW keeps shape of shape (2, 3) for 0.up.",
    }
    assert first.keys() == words.keys() | {"steps"}
    for what, expected in words.items():
        assert expected in first[what], what


def interrupted(folder):
    """Saves that fail on one rank, at each place where they can: what they say."""
    made_of = made(2)
    if made_of is None:
        return None
    group, rank, answers = first_ranks(2), dist.get_rank(), []
    original = storage.write

    def full(path, data):
        original(path, data[:10])
        raise OSError(28, "No space left on device")

    with Checkpoints(folder, keep=1, group=group) as checkpoints:
        checkpoints.save(1, *made_of)
        for name in "rest.pt", "manifest.json":
            storage.write = lambda path, data, name=name: (full if path.name == name else original)(
                path, data
            )
            answers.append(refusal(lambda: checkpoints.save(2, *made_of)))
            storage.write = original
        original_open = Path.open
        if rank == 1:  # its shards

            def no_room(path, mode="r", *more):
                if path.suffix == ".distcp":
                    raise OSError(28, "No space left on device")
                return original_open(path, mode, *more)

            Path.open = no_room
        answers.append(refusal(lambda: checkpoints.save(2, *made_of)))
        checkpoints.save_async(2, *made_of)  # and in the background: what follows raises it
        answers.append(refusal(checkpoints.wait))
        checkpoints.save_async(2, *made_of)
        answers.append(refusal(lambda: checkpoints.save(3, *made_of)))
        Path.open = original_open
        assert checkpoints.steps() == [1] and refusal(checkpoints.wait) is None
        left = sorted(path.name for path in Path(folder).iterdir())
        assert checkpoints.load(*made_of).step == 1
        checkpoints.save_async(2, *made_of)
    assert checkpoints.steps() == [2]
    return answers, left


def test_a_save_that_fails_leaves_the_one_before_and_no_rubbish(five, tmp_path):
    (answers, left), (others, _) = five.call(interrupted, str(tmp_path / "state"))[:2]
    assert answers == others
    expected = ["on rank 0: [Errno 28] No space left on device"] * 2
    expected += ["on rank 1: [Errno 28] No space left on device"] * 3
    assert answers == expected
    assert left == [".lock", "step-00000001"]


def with_a_limit_for_files(folder):
    group = first_ranks(1)
    if dist.get_rank():
        return None
    model, kind = nn.Linear(64, 64), resource.RLIMIT_FSIZE
    soft, hard = resource.getrlimit(kind)
    with Checkpoints(folder, group=group) as checkpoints:
        resource.setrlimit(kind, (2**13, hard))
        try:
            return refusal(lambda: checkpoints.save(1, model))
        finally:
            resource.setrlimit(kind, (soft, hard))


def test_what_the_system_says_of_a_write_is_told(five, tmp_path):
    """In place of what torch.save makes of it: "unexpected pos 704 vs 598"."""
    told = five.call(with_a_limit_for_files, str(tmp_path / "state"))[0]
    assert told == "on rank 0: [Errno 27] File too large"


def without_room_for_copies(folder):
    if (made_of := made(2)) is None:
        return None
    original = torch.Tensor.to
    with Checkpoints(folder, group=first_ranks(2)) as checkpoints:
        if dist.get_rank() == 1:

            def no_room(tensor, *args, **kwargs):
                if kwargs.get("copy"):
                    raise RuntimeError("can't allocate memory")
                return original(tensor, *args, **kwargs)

            torch.Tensor.to = no_room
        try:
            return refusal(lambda: checkpoints.save_async(1, *made_of))
        finally:
            torch.Tensor.to = original


def test_a_rank_without_room_for_copies_is_told_to_all(five, tmp_path):
    answers = five.call(without_room_for_copies, str(tmp_path / "state"))[:2]
    assert answers == ["on rank 1: RuntimeError: can't allocate memory"] * 2


def keep_nothing_on_one_rank(folder):
    if (group := first_ranks(2)) is None or dist.get_rank() > 1:
        return None
    with pytest.raises(ValueError) as error:
        Checkpoints(folder, keep=0 if dist.get_rank() else 3, group=group)
    return str(error.value)


def test_a_wrong_keep_of_one_rank_is_told_to_all(five, tmp_path):
    expected = "on rank 1: keep must be a whole number of at least 1, or None, not 0"
    assert five.call(keep_nothing_on_one_rank, str(tmp_path))[:2] == [expected] * 2


def wrong_shards(folder):
    """Shards that are not the whole, or not of one model."""
    made_of = made(2)
    if made_of is None:
        return None
    group, rank, answers = first_ranks(2), dist.get_rank(), []
    zero, optimizer = made_of
    original = Part.boxes
    checkpoints = Checkpoints(folder, group=group)
    for wrong in "gap", "overlap", "shape":

        def boxes(part, memory, wrong=wrong):
            right = original(part, memory)
            if part.name != "0.up.weight":
                return right
            if rank:  # which has no element of it
                return right._replace(shape=(3, 8)) if wrong == "shape" else right
            if wrong == "gap":
                return right._replace(views=dict(list(right.views.items())[1:]))
            if wrong == "overlap":
                twice = {Box((1, 1), (1, 1)): memory[5:6].view(1, 1)}
                return right._replace(views=right.views | twice)
            return right

        Part.boxes = boxes
        answers.append(refusal(lambda: checkpoints.save(1, zero, optimizer)))
        Part.boxes = original
    alone = Checkpoints(Path(folder) / "alone", group=dist_group_of_one())
    answers.append(refusal(lambda: alone.save(1, zero, optimizer)))  # the other rank is missing
    answers.append(refusal(lambda: Checkpoints(Path(folder) / "file", group=group).save(1, zero)))
    return answers


def dist_group_of_one():
    """A group of this rank alone; of both, the first makes the first one."""
    groups = [dist.new_group([rank], use_local_synchronization=True) for rank in range(2)]
    return groups[dist.get_rank()]


def test_shards_that_are_not_the_whole_are_refused(five, tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "file").touch()
    answers, others = five.call(wrong_shards, str(folder))[:2]
    assert answers[:3] == others[:3]
    gap, overlap, shape, alone, file = answers
    what = "the ranks' shards of parameters.0.up.weight, of shape [6, 4], do not make up the "
    assert gap.startswith(what) and "elements are on no rank; every rank with a part" in gap
    assert overlap.startswith(what) and " overlap; " in overlap
    assert (
        "parameters.0.up.weight has shape [6, 4] and dtype float32 on rank 0, shape [3, 8]" in shape
    )
    assert "are on no rank; every rank with a part of the model must call this" in alone
    assert "File exists" in file
    assert {path.name for path in folder.iterdir()} == {"file"}, "nothing was written"


OTHER = """
import sys, time
from naranhi.checkpoint.storage import Storage
storage = Storage(sys.argv[1])
storage.claim()
print("claimed", flush=True)
time.sleep(600)
"""


def claims(folder):
    made_of = made(2)
    if made_of is None:
        return None
    with Checkpoints(folder, group=first_ranks(2)) as checkpoints:
        return refusal(lambda: checkpoints.save(1, *made_of)), refusal(checkpoints.claim)


def test_two_runs_do_not_save_into_one_folder(five, tmp_path):
    """And one that was killed does not stand in the way."""
    other = subprocess.Popen([sys.executable, "-c", OTHER, tmp_path], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"claimed\n"
        first, second = five.call(claims, str(tmp_path))[:2]
        assert first == second and first[0] == first[1]
        assert first[0].startswith(f"on rank 0: {tmp_path} is in use: process {other.pid} on "), (
            first[0]
        )
        assert first[0].endswith("saves into it; end that run, or give this run a different folder")
        assert not any(storage.COMMITTED.match(path.name) for path in tmp_path.iterdir())
    finally:
        other.kill()
        other.communicate()
    assert five.call(claims, str(tmp_path))[0] == (None, None)


def on_a_full_disk(folder):
    """A disk that fills while saving in the background; then with room again."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    run = Run("zero3", group)
    run.step(0)
    with run.checkpoints(folder) as checkpoints:
        run.save(checkpoints, 1)
        filler = Path(folder) / "filler"
        if rank == 0:
            free = shutil.disk_usage(folder).free
            filler.write_bytes(bytes(max(free - 100_000, 0)))
        dist.barrier(group)
        run.save(checkpoints, 2, "save_async")
        told = refusal(checkpoints.wait)
        assert checkpoints.steps() == [1] and run.load(checkpoints).step == 1
        dist.barrier(group)
        if rank == 0:
            filler.unlink()
        dist.barrier(group)
        run.save(checkpoints, 2)
        return told, checkpoints.steps()


def test_a_disk_that_fills_while_saving(five, needs, tmp_path):
    needs("mount", "mount", as_root=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", tmp_path], check=True)
    try:
        (told, steps), (other, _) = five.call(on_a_full_disk, str(tmp_path))[:2]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert told == other and "No space left on device" in told
    assert steps == [1, 2]
