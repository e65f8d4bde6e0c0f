"""What `join` makes of a launcher's environment; `tests/cluster` has launchers and their nodes."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from naranhi import distributed
from naranhi.distributed import addresses, launch

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
TIMEOUTS = """
import torch
import torch.distributed as dist
from naranhi import distributed

distributed.join(timeout=7)
for group in dist.group.WORLD, dist.new_group([0]), distributed.Mesh().data:
    print(group._get_backend(torch.device("cpu")).options._timeout)
"""


@pytest.mark.processes
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
device = distributed.join(timeout=30)
print(f"{device} {dist.get_backend()}\\n", end="")  # in one write: ranks are unbuffered
dist.barrier()  # gloo's ranks connect one after another, and none may leave meanwhile
dist.destroy_process_group()
"""


@pytest.mark.processes
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


@pytest.mark.parametrize("toward", ["127.0.0.1", "10.1.2.3"])
def test_on_several_nodes_gloo_listens_toward_another_one(monkeypatch, toward):
    """Also on the node of `MASTER_ADDR`, where its name may be the loopback's."""
    store, listens = dist.HashStore(), []
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setattr(addresses, "toward", lambda host: toward)
    monkeypatch.setattr(addresses, "use_interface_toward", listens.append)
    if toward == "127.0.0.1":
        store.set("another", "10.1.2.3")
    launch._interface_toward_other_nodes(store)
    assert listens == ["10.1.2.3"] and store.get("another") == b"10.1.2.3"


@pytest.mark.parametrize(
    "given, local",
    [
        ({"LOCAL_RANK": "1", "SLURM_PROCID": "5", "SLURM_LOCALID": "3"}, 1),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "3"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, 5),  # of the shell that has started it
        ({}, 5),
    ],
)
def test_the_local_rank_is_the_launchers_or_slurms(monkeypatch, given, local):
    for name in ("LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert launch._local_rank(5) == local


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_without_the_rest(monkeypatch, name):
    for known, value in LAUNCHED.items():
        monkeypatch.setenv(known, value)
    monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match=f"RANK is in the environment and {name} is not"):
        distributed.join()


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_SUBMIT_DIR"])
def test_a_task_of_slurm_without_the_rest(monkeypatch, name):
    """As in a container that gets some of a job's variables."""
    monkeypatch.delenv("RANK", raising=False)
    known = "STEP_ID", "PROCID", "NTASKS", "LOCALID", "STEP_NUM_NODES", "JOB_ID", "SUBMIT_DIR"
    for each in known:
        monkeypatch.setenv(f"SLURM_{each}", "1")
    monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match=f"SLURM_STEP_ID is .* and {name} is not"):
        distributed.join()


@pytest.mark.parametrize(
    ("local", "words"),
    [({}, "no store"), ({"LOCAL_WORLD_SIZE": "one"}, "LOCAL_WORLD_SIZE is 'one'")],
)
def test_torchruns_number_of_local_ranks_may_be_missing(monkeypatch, local, words):
    def no_store(*_, **__):
        raise RuntimeError("no store")

    monkeypatch.setattr(launch.processes, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(dist, "rendezvous", no_store)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for known, value in {**LAUNCHED, "TORCHELASTIC_RUN_ID": "1", **local}.items():
        monkeypatch.setenv(known, value)
    with pytest.raises(RuntimeError, match=words):
        distributed.join()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"])
def test_a_number_that_is_none(monkeypatch, name):
    for known, value in {**LAUNCHED, name: "one"}.items():
        monkeypatch.setenv(known, value)
    with pytest.raises(RuntimeError, match=f"{name} is 'one' in the environment, and not a whole"):
        distributed.join()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "RANK",
            "1",
            "RANK is 1 in the environment and WORLD_SIZE 1: RANK has to be smaller",
        ),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536 in the environment: ports end at 65535"),
    ],
)
def test_a_number_that_cannot_be(monkeypatch, name, value, words):
    for known, given in {**LAUNCHED, name: value}.items():
        monkeypatch.setenv(known, given)
    with pytest.raises(RuntimeError, match=words):
        distributed.join()


SIGNALS = """
import os, signal, sys, time
from naranhi.distributed import peers

signal.signal(signal.SIGUSR1, lambda *_: print("saved", flush=True))
peers.on_signals([signal.SIGTERM], lambda: print("ending", flush=True))
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(1)
print("still here", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""


@pytest.mark.processes
def test_a_process_ends_on_its_signals_and_not_on_the_users():
    ran = subprocess.run(
        [sys.executable, "-c", SIGNALS], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.split("\n") == ["saved", "still here", "ending", ""], ran.stderr
    assert ran.returncode == -9
