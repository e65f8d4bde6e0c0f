"""Ranks that keep others waiting, or are lost, while a checkpoint is written or read."""

import datetime
import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpointed import refusal
from forked import Forked
from torch import nn

from naranhi import World
from naranhi.checkpoint import Checkpoints, storage
from naranhi.checkpoint.writing import Write
from naranhi.world.errors import RankError

SHORT = datetime.timedelta(seconds=1.5)


def with_a_slow_disk(folder):
    """Save and load where a rank is slower than the timeout that collectives have by default."""
    model, write, verify = nn.Linear(2, 2), Write._finish, storage.Storage.verify
    timeout = dist.distributed_c10d.default_pg_timeout

    def slow(function):
        return lambda *args: (time.sleep(3.0 * dist.get_rank()), function(*args))[1]

    dist.distributed_c10d.default_pg_timeout = SHORT  # as `join` and a World set theirs
    Write._finish, storage.Storage.verify = slow(write), slow(verify)
    try:
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, model)
            checkpoints.save_async(2, model)
            checkpoints.wait()
            return checkpoints.load(model).step, checkpoints.steps()
    finally:
        Write._finish, storage.Storage.verify = write, verify
        dist.distributed_c10d.default_pg_timeout = timeout


def test_a_slow_disk_may_keep_the_ranks_waiting(eight, tmp_path):
    assert eight(2, with_a_slow_disk, str(tmp_path)) == [(2, [1, 2])] * 2


def beyond_the_timeout(folder):
    """What a save says in a group whose timeout is too short; and what it leaves."""
    model, write = nn.Linear(2, 2), Write._finish
    checkpoints = Checkpoints(folder, group=dist.new_group(timeout=SHORT))
    checkpoints.save(1, model)
    Write._finish = lambda *args: (time.sleep(4.0 * dist.get_rank()), write(*args))[1]
    try:
        said = refusal(lambda: checkpoints.save(2, model))
    finally:
        Write._finish = write
    dist.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())
    checkpoints.close()
    return said, left


def test_a_timeout_is_an_error_in_words_and_leaves_no_rubbish(eight, tmp_path):
    for said, left in eight(2, beyond_the_timeout, str(tmp_path)):
        assert said.startswith("a rank was lost, or did not answer in time (")
        assert said.endswith("the checkpoints committed before are intact")
        assert left == [".lock", "step-00000001"]


DIES = """
import json, os, sys, time
import torch.distributed as dist
from torch import nn
from naranhi.checkpoint import CheckpointError, Checkpoints
from naranhi.checkpoint.writing import Write
dist.init_process_group("gloo")
checkpoints, method = Checkpoints(sys.argv[1]), sys.argv[2]
checkpoints.save(1, nn.Linear(2, 2))
write = Write._finish
Write._finish = lambda *args: os._exit(0) if dist.get_rank() else write(*args)
begin, said = time.monotonic(), None
try:
    getattr(checkpoints, method)(2, nn.Linear(2, 2))
    checkpoints.wait()
except CheckpointError as error:
    said = str(error)
left = sorted(os.listdir(sys.argv[1]))
print(json.dumps([said, time.monotonic() - begin, left]), flush=True)
os._exit(0)
"""


@pytest.mark.ranks
def test_a_rank_that_dies_ends_the_save_at_once(tmp_path):
    program = tmp_path / "dies.py"
    program.write_text(DIES)
    with Forked("torch.distributed") as forked:
        for method in "save", "save_async":
            done = forked.run(2, program, tmp_path / method, method)
            assert done.returncode == 0 and done.stdout, done.stderr
            said, seconds, left = json.loads(done.stdout)
            assert said.startswith("a rank was lost, or did not answer in time (")
            assert seconds < 60.0
            assert left == [".lock", "step-00000001"]


SLOW = """
import time
from torch import nn
from naranhi.checkpoint import Checkpoints
from naranhi.checkpoint.writing import Write
finish = Write._finish
Write._finish = lambda *args: (time.sleep(6.0 * rank), finish(*args))[1]
with Checkpoints({folder!r}) as checkpoints:
    checkpoints.save(1, nn.Linear(2, 2))
print(checkpoints.steps())
"""
ALONE = """
checkpoints = Checkpoints({folder!r})
if rank == 0:
    checkpoints.save(2, nn.Linear(2, 2))
"""
ENDS = """
class Gone(BaseException):
    pass

def gone(*args):
    if rank:
        raise Gone
    return finish(*args)

Write._finish = gone
Checkpoints({folder!r}).save(3, nn.Linear(2, 2))
"""


@pytest.mark.ranks
def test_a_world_waits_for_disks_and_ends_a_cell_that_cannot_go_on(tmp_path, capsys):
    folder = str(tmp_path / "run")
    world = World(2, timeout=4.0)
    try:
        world.execute(SLOW.format(folder=folder))
        assert "[1]" in capsys.readouterr().out
        with pytest.raises(RankError, match="rank 1 did not take part within 4 s: at the end"):
            world.execute(ALONE.format(folder=folder))
        begin = time.monotonic()
        with pytest.raises(RankError, match="rank 1 raised Gone"):
            world.execute(ENDS.format(folder=folder))
        assert time.monotonic() - begin < 60.0
    finally:
        world.close()
