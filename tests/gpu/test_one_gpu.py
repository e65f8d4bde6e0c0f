"""What asks whether there is a GPU, on one: a World, the machine, clocks, random numbers."""

from time import perf_counter

import pytest
import torch
from torch import nn

import naranhi
from naranhi import measure, models, pipeline
from naranhi.autograd import recompute
from naranhi.measure import hardware

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
