"""What asks whether there is a GPU, on one: a World, a launcher, the machine, clocks."""

import os
import subprocess
import sys
import threading
import time
from time import perf_counter

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import naranhi
from naranhi import measure, models, pipeline
from naranhi.autograd import recompute
from naranhi.measure import hardware
from naranhi.world import engine

pytestmark = pytest.mark.gpu
LONG = 200_000_000  # clock cycles: about a tenth of a second


def test_a_world_of_one_rank_has_the_gpu_and_nccl():
    world = naranhi.World(1)
    try:
        assert world.backend == "nccl"
        world.execute("total = torch.ones(4, device=device); dist.all_reduce(total)")
        assert world["total"][0].tolist() == [1.0] * 4
        assert str(world["device"][0]) == "cuda:0"
        world.execute("matrix = torch.randn(2 * [4096], device=device)\nmatrix = matrix @ matrix")
    finally:
        world.close()


def test_nccl_for_more_ranks_than_gpus_is_refused_at_once():
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match=f"needs one GPU for each of the {ranks} ranks"):
        naranhi.World(ranks, backend="nccl")


def test_a_launcher_gives_its_rank_the_gpu_and_nccl(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "from naranhi.distributed import launch\n"
        "device = launch.join(timeout=60)\n"
        "total = torch.ones(2, device=device)\n"
        "dist.all_reduce(total)\n"
        "print(device, dist.get_backend(), total.sum().item())\n"
        "dist.destroy_process_group()\n"
    )
    ranks = torch.cuda.device_count()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [f"cuda:{rank} nccl {2.0 * ranks}" for rank in range(ranks)]
    assert sorted(done.stdout.split("\n"))[1:] == lines


def test_ranks_that_would_share_a_gpu_compute_on_cpus_and_say_so(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch.distributed as dist\n"
        "from naranhi import distributed\n"
        "print(distributed.join(timeout=60), dist.get_backend())\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", program],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["cpu gloo"] * 2, done.stderr
    assert done.stderr.count("because ranks 0 and 1 would share a GPU") == 1, done.stderr


def test_a_forward_in_a_thread_has_the_stream_of_its_caller():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        x = torch.ones(8, device="cuda")

        def forward():
            return [x + 1, torch.cuda.current_stream(), torch.cuda.current_device()]

        (y, stream, device), _ = pipeline.in_threads(forward, list)
    assert stream == side and device == torch.cuda.current_device()
    side.synchronize()
    assert y.tolist() == [2.0] * 8


def wait_for_nobody(rank, folder):
    """Rank 0 waits in NCCL for rank 1, which does not come, until connections are severed."""
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_HOSTID=f"rank-{rank}")  # as in test_kernels
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 0:
        threading.Timer(2.0, engine.sever).start()
        start = perf_counter()
        try:
            dist.all_reduce(x)
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"rank 0: {error}", flush=True)
        torch.save(perf_counter() - start, folder / "waited.pt")
    while not (folder / "waited.pt").exists():
        time.sleep(0.1)
    os._exit(0)  # the process group is gone


def test_a_wait_in_nccl_ends_when_connections_are_severed(tmp_path):
    context = mp.spawn(wait_for_nobody, (tmp_path,), nprocs=2, join=False)
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "waited.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert 1.9 < torch.load(tmp_path / "waited.pt") < 20
    finally:
        for process in context.processes:
            process.kill()


def test_the_machine_names_its_gpus_and_their_caches():
    assert hardware.gpus()[0].count >= 1
    assert any(part.detail == torch.cuda.get_device_name(0) for part in hardware.gpus())
    [cache] = hardware.caches("cuda")
    assert 2**20 < cache.bytes < 2**30
    assert hardware.topology() is None or "GPU0" in hardware.topology()


def test_a_measured_time_lasts_until_the_gpu_has_finished():
    start = perf_counter()
    torch.cuda._sleep(LONG)
    launched = perf_counter() - start
    torch.cuda.synchronize()
    best = measure.best_seconds({"sleep": lambda: torch.cuda._sleep(LONG)}, device="cuda")
    assert best["sleep"] > 0.03 > 10 * launched


def test_a_paced_layer_takes_its_time_on_the_gpu_too():
    layer = models.Paced(nn.Linear(8, 8).cuda(), forward=0.05, backward=0.05)
    x = torch.ones(2, 8, device="cuda", requires_grad=True)
    layer(x)
    start = perf_counter()
    layer(x)
    assert 0.05 <= perf_counter() - start < 0.1
    assert layer.late <= 1


def test_a_profile_lasts_until_the_gpu_has_finished():
    class Slow(nn.Module):
        def forward(self, x):
            torch.cuda._sleep(LONG)
            return x * 1.0

    x = torch.ones(4, device="cuda", requires_grad=True)
    [profile] = pipeline.profile([Slow()], x, repeats=2)
    assert profile.forward > 0.03


def test_recomputation_draws_the_gpus_random_numbers_again():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    x = torch.ones(8, 64, device="cuda", requires_grad=True)
    y = recompute(model, x)
    [gradient] = torch.autograd.grad(y.sum(), x)
    expected = (y != 0).float() * 2 @ model[0].weight
    torch.testing.assert_close(gradient, expected)
