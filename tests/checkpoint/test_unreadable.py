"""Files that a rank cannot read, or does not see yet: not damage, for which a run would go back."""

import errno
import hashlib
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpointed import refusal
from torch import nn

from naranhi.checkpoint import Checkpoints, reading


def read_by(folder, failing, seconds):
    """On two ranks: what load says where reading fails on rank 1, or the step that it has loaded.

    failing: "read" (EIO) for ever, or "see" for some seconds.
    """
    model, rank = nn.Linear(2, 2), dist.get_rank()
    originals = Path.stat, hashlib.file_digest
    end = time.monotonic() + seconds
    files = getattr(reading, "files", None)  # none, before ranks waited for files
    appears = getattr(files, "APPEARS", None)

    def unseen(path, **options):
        if path.suffix == ".distcp" and time.monotonic() < end:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return originals[0](path, **options)

    def unread(file, digest):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model)
        checkpoints.save(2, model)
    with Checkpoints(folder, keep=1) as checkpoints:
        if rank and failing == "read":
            hashlib.file_digest = unread
        elif rank:
            Path.stat = unseen
        if files and seconds > 10:
            files.APPEARS = 0.5
        try:
            said = refusal(lambda: checkpoints.load(model))
        finally:
            Path.stat, hashlib.file_digest = originals
            if files:
                files.APPEARS = appears
        checkpoints.save(3, model)
        return said, checkpoints.steps(), checkpoints.load(model).skipped


@pytest.mark.parametrize("failing", ["read", "see"])
@pytest.mark.filterwarnings("ignore:loading step")
def test_what_a_rank_cannot_read_is_not_damage(eight, tmp_path, failing):
    """The run stops, rather than go on from an earlier step and replace a good checkpoint."""
    first, second = eight(2, read_by, str(tmp_path), failing, 1e9)
    assert first == second
    said, steps, skipped = first
    shard = tmp_path / "step-00000002" / "__0_0.distcp"
    if failing == "read":
        assert said.startswith(f"on rank 1: {shard} cannot be read: Input/output error")
    else:
        assert said.startswith(f"{shard} is there, but rank 1 did not see it within 0.5 s: put the")
    assert (steps, skipped) == ([3], {}), "the good one counted among the newest"


@pytest.mark.filterwarnings("ignore:loading step")
def test_a_file_may_appear_later_on_another_node(eight, tmp_path):
    assert eight(2, read_by, str(tmp_path), "see", 1.5) == [(None, [3], {})] * 2


def taken_by_some(folder):
    """What load says where one rank has no room for the optimizer's state."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, model, optimizer)
        if dist.get_rank():
            optimizer.load_state_dict = no_room
        return refusal(lambda: checkpoints.load(model, optimizer))


def no_room(state):
    raise MemoryError("no room")


def test_what_one_rank_cannot_take_is_told_to_all(eight, tmp_path):
    said = eight(2, taken_by_some, str(tmp_path))
    assert said == ["on rank 1: MemoryError: no room"] * 2


def listed_by_each(folder):
    """The steps where ranks see different folders under one name."""
    before = os.getcwd()
    here = Path(folder, str(dist.get_rank()))
    here.mkdir()
    os.chdir(here)
    try:
        with Checkpoints("run") as checkpoints:
            if dist.get_rank() == 0:
                Path("run", "step-00000001").mkdir(parents=True)
            return checkpoints.steps()
    finally:
        os.chdir(before)


def test_all_ranks_list_the_same_steps(eight, tmp_path):
    """Or some would load and others begin."""
    assert eight(2, listed_by_each, str(tmp_path)) == [[1], [1]]
