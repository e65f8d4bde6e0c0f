"""What `join` makes of a launcher's environment; `tests/cluster` has launchers and their nodes."""

import os
import subprocess
import sys

import pytest

from naranhi import distributed

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
TIMEOUTS = """
import torch
import torch.distributed as dist
from naranhi import distributed

distributed.join(timeout=7)
for group in dist.group.WORLD, dist.new_group([0]), distributed.Mesh().data:
    print(group._get_backend(torch.device("cpu")).options._timeout)
"""


def test_the_deadline_holds_for_groups_made_later():
    said = subprocess.run(
        [sys.executable, "-c", TIMEOUTS],
        env={**os.environ, **LAUNCHED, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stdout.splitlines() == ["0:00:07"] * 3, said.stderr


def test_a_rank_without_a_world_size(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="RANK is in the environment and WORLD_SIZE is not"):
        distributed.join()
