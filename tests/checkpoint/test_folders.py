"""The folder of a run: what a save deletes in it, and what it leaves."""

from pathlib import Path

import pytest
import torch
from checkpointed import refusal
from torch import nn

from naranhi.checkpoint import Checkpoints
from naranhi.checkpoint.storage import Storage


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
