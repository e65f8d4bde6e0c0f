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


SHARED = """
import torch.distributed as dist
from naranhi import distributed
from naranhi.distributed import gpus

gpus.visible = lambda: ["GPU-1"]
print(distributed.join(timeout=30), dist.get_backend())
dist.barrier()  # gloo's ranks connect one after another, and none may leave meanwhile
dist.destroy_process_group()
"""


def test_ranks_that_would_share_a_gpu_compute_on_cpus_and_say_so(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SHARED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr=127.0.0.1"]
    said = subprocess.run(
        [*launcher, *meeting, program], capture_output=True, text=True, timeout=120
    )
    assert said.stdout.splitlines() == ["cpu gloo"] * 2, said.stderr
    warning = "all ranks compute on CPUs, because ranks 0 and 1 would share a GPU"
    assert said.stderr.count(warning) == 1, said.stderr


def test_a_rank_without_a_world_size(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="RANK is in the environment and WORLD_SIZE is not"):
        distributed.join()
