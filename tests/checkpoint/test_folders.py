"""The folder of a run: what a save deletes in it, and what it leaves."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from checkpointed import refusal
from torch import nn

from naranhi.checkpoint import Checkpoints, storage


@pytest.fixture(scope="module")
def one(eight):
    """`one(function, *args)`: its result on a world of one rank."""
    return lambda function, *args: eight(1, function, *args)[0]


def after_damage(folder, method):
    """The steps that are there after each save, where the newest checkpoint was damaged."""
    model, steps = nn.Linear(2, 2), []
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(10, model)
        checkpoints.save(20, model)
    shard = next(Path(folder, "step-00000020").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-50])
    with Checkpoints(folder, keep=1) as checkpoints:
        assert checkpoints.load(model).step == 10
        for step in 12, 14, 20, 22:
            getattr(checkpoints, method)(step, model)
            checkpoints.wait()
            steps.append(checkpoints.steps())
            with Checkpoints(folder) as reader:
                assert reader.load(model).step == step
    return steps


@pytest.mark.parametrize("method", ["save", "save_async"])
@pytest.mark.filterwarnings("ignore:loading step")
def test_a_damaged_checkpoint_does_not_count_among_the_newest(one, tmp_path, method):
    assert one(after_damage, str(tmp_path), method) == [[12, 20], [14, 20], [20], [22]]


def in_a_folder_with_a_lock(folder):
    with Checkpoints(folder) as checkpoints:
        return refusal(lambda: checkpoints.save(1, nn.Linear(2, 2)))


@pytest.mark.parametrize("linked", [True, False])
def test_a_lock_that_is_not_the_runs_keeps_what_is_in_it(one, tmp_path, linked):
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    folder.mkdir()
    theirs.write_text("process of cooking")
    lock = folder / ".lock"
    if linked:
        lock.symlink_to(theirs)
    else:
        lock.write_bytes(b"\xff\xfethesis")
    said = one(in_a_folder_with_a_lock, str(folder))
    words = "Too many levels of symbolic links" if linked else "belongs to another program, and"
    assert words in said and str(lock) in said
    assert lock.read_bytes() == (b"process of cooking" if linked else b"\xff\xfethesis")


def symlinked(folder):
    """A run that goes on from a symbolic link to another run's checkpoint."""
    model, first, second = nn.Linear(2, 2), Path(folder, "first"), Path(folder, "second")
    with Checkpoints(first) as checkpoints:
        checkpoints.save(1, model)
    second.mkdir()
    (second / "step-00000001").symlink_to(first / "step-00000001")
    (second / "step-00000001.part").symlink_to(first)
    with Checkpoints(second, keep=1) as checkpoints:
        assert checkpoints.load(model).step == 1
        checkpoints.save(2, model)
        assert checkpoints.steps() == [2]
    with Checkpoints(first) as checkpoints:
        return checkpoints.load(model).step


def test_of_a_symbolic_link_the_link_is_deleted(one, tmp_path):
    assert one(symlinked, str(tmp_path)) == 1
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == [
        ".lock",
        "step-00000002",
    ]


def undeletable(folder):
    """Saves where an earlier checkpoint, and what a killed save has left, cannot be deleted."""
    model, rmtree = nn.Linear(2, 2), shutil.rmtree

    def denied(path, *options, **more):
        if "00000001" in str(path) or "00000009" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        rmtree(path, *options, **more)

    Path(folder, "step-00000009.part").mkdir(parents=True)
    with Checkpoints(folder, keep=1) as checkpoints, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shutil.rmtree = denied
        try:
            for step in 1, 2, 3:
                checkpoints.save(step, model)
                assert checkpoints.steps() == [step]
        finally:
            shutil.rmtree = rmtree
        return {str(warning.message) for warning in caught}


def test_what_cannot_be_deleted_ends_no_run(one, tmp_path):
    told = one(undeletable, str(tmp_path))
    why = "cannot be deleted (Permission denied): the run goes on; delete this path by hand"
    assert f"{tmp_path / 'step-00000009.part'} {why}" in told
    assert f"{tmp_path / 'step-00000001'} {why}" in told


FORKS = """
import os, sys, time
from naranhi.checkpoint.storage import Storage
storage = Storage(sys.argv[1])
storage.claim()
inherited, end = os.pipe()
if os.fork() == 0:  # as a DataLoader's worker, which lives on
    os.write(end, b"x")
    time.sleep(600)
os.read(inherited, 1)
if "release" in sys.argv:
    storage.release()
print("forked", flush=True)
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["release", "kill"])
def test_a_forked_process_does_not_keep_the_folder(tmp_path, how):
    """After `close`, and after the run was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS, tmp_path, how], stdout=subprocess.PIPE, process_group=0
    )
    try:
        assert process.stdout.readline() == b"forked\n"
        if how == "kill":
            process.kill()
            process.wait()
        second = storage.Storage(tmp_path)
        second.claim()
        second.release()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
