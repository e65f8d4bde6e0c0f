"""Groups that `dist.get_backend` gives no name, or several."""

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from naranhi import collectives
from naranhi.distributed import backend_for, device_of, links

DEVICES = ["cpu", torch.device("cpu"), "cuda", torch.device("cuda", 1), "meta"]


def backends(name):
    group = dist.new_group(backend=name)
    found = [backend_for(device, group) for device in DEVICES]
    return found, str(device_of(group)), dist.get_backend(group)


@pytest.mark.parametrize(
    ("name", "cpu", "cuda"),
    [
        ("gloo", "gloo", "gloo"),
        ("cpu:gloo", "gloo", None),
        ("cpu:gloo,cuda:fake", "gloo", "fake"),
        ("cuda:gloo,cpu:fake", "fake", "gloo"),
        ("fake", "fake", "fake"),
    ],
)
def test_a_group_sends_by_the_backend_of_the_device(name, cpu, cuda, five):
    for found, device, called in five.call(backends, name):
        assert found == [cpu, cpu, cuda, cuda, None]
        assert device == "cpu"  # without NCCL nothing is exchanged from a GPU
        assert called == name


def nccl():
    """Torch cannot make this group here; what it says of one is this text."""
    told, dist.get_backend_config = dist.get_backend_config, lambda group: "cpu:gloo,cuda:nccl"
    asked, torch.cuda.current_device = torch.cuda.current_device, lambda: 3
    try:
        return backend_for("cpu"), backend_for("cuda"), str(device_of())
    finally:
        dist.get_backend_config, torch.cuda.current_device = told, asked


def test_nccl_makes_it_this_ranks_gpu(five):
    assert set(five.call(nccl)) == {("gloo", "nccl", "cuda:3")}


def all_reduced():
    group = dist.new_group(backend="cpu:gloo")
    with links.paced(0.0, 0.0):
        collectives.all_reduce(tensor := torch.full((10,), 10.0 ** dist.get_rank()), group)
    return tensor.tolist()


def test_messages_of_a_group_for_cpus_can_be_sent_and_paced(five):
    assert five.call(all_reduced) == [[11_111.0] * 10] * 5


def paced_by_another():
    group = dist.new_group(backend="cpu:fake")
    with (
        links.paced(0.0, 0.0),
        pytest.raises(ValueError, match="only gloo's messages can be paced"),
    ):
        dist.isend(torch.zeros(1), group=group, group_dst=0)


def test_others_cannot_be_paced(five):
    five.call(paced_by_another)
