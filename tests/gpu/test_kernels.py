"""The kernels on tensors of a device: on CPUs by gloo, and where there is a GPU by NCCL.

Two ranks can share one GPU if NCCL takes them for ranks of different hosts. That shows that the
results are right with messages that travel, and nothing about speed.
"""

import datetime
import os
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from device_parts import PARTS

SECONDS = 240  # for all parts on one set of ranks, the imports included
WORLDS = {  # name: backend, device, ranks
    "gloo for CPUs, 2 ranks": ("cpu:gloo", "cpu", 2),
    "NCCL, 1 rank": ("nccl", "cuda:0", 1),
    "what torch chooses, 1 rank": (None, "cuda:0", 1),
    "gloo and NCCL, 1 rank": ("cpu:gloo,cuda:nccl", "cuda:0", 1),
    "NCCL, 2 ranks on one GPU": ("nccl", "cuda:0", 2),
    "NCCL, 2 GPUs": ("nccl", "cuda:{rank}", 2),
}


def world(name):
    _, device, ranks = WORLDS[name]
    marks = [pytest.mark.gpu] if "cuda" in device else [pytest.mark.ranks]
    needed = ranks if "{rank}" in device else 1
    if "cuda" in device and torch.cuda.device_count() < needed:
        marks.append(pytest.mark.skip(reason=f"needs {needed} GPU{'s' * (needed > 1)}"))
    return pytest.param(name, marks=marks)


@pytest.fixture(scope="module", params=[world(name) for name in WORLDS])
def outcomes(request, tmp_path_factory):
    """{part: None or the traceback of the rank that failed first} of one world."""
    backend, device, ranks = WORLDS[request.param]
    store = tmp_path_factory.mktemp("parts")
    context = mp.spawn(run_parts, (ranks, backend, device, store), nprocs=ranks, join=False)
    try:
        context.join(timeout=SECONDS, grace_period=5)
    finally:
        for process in context.processes:
            process.kill()
    reached = [torch.load(file) for file in sorted(store.glob("*.pt"))]
    assert len(reached) == ranks
    return {
        part: next(filter(None, (each.get(part, "not reached in time") for each in reached)), None)
        for part in PARTS
    }


def run_parts(rank, ranks, backend, device, folder):
    """On a rank: every part, up to the first that fails; then the ranks are out of step."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    if ranks > 1 and device == "cuda:0":  # NCCL refuses two ranks on one GPU
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30 on
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # before: ranks of different hosts
    torch.set_num_threads(1)
    device = device.format(rank=rank)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(folder / "store"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    outcome = {}
    for name, part in PARTS.items():
        try:
            part(device)
        except Exception:
            outcome[name] = traceback.format_exc()
        else:
            outcome[name] = None
        torch.save(outcome, folder / f"{rank}.pt")
        if outcome[name]:
            return
    dist.destroy_process_group()


@pytest.mark.parametrize("part", PARTS)
def test_each_part_gives_what_one_process_does(outcomes, part):
    assert outcomes[part] is None, outcomes[part]
