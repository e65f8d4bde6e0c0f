"""Parameters that share memory are found, and refused where they would be trained apart."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_loop import squared_error
from torch import nn

from naranhi import models, pipeline, schedules
from naranhi.autograd.shared_memory import sharing_memory
from naranhi.tensor_parallel import mlp_plan, parallelize
from naranhi.zero import Zero


def test_only_a_common_element_is_shared_memory():
    whole = torch.zeros(6, 4)
    tensors = {
        "top": whole[:3],
        "bottom": whole[3:],
        "middle": whole[2:4],
        "left": whole[4:, :2],
        "right": whole[4:, 2:],
        "turned": whole[4:, 2:].t(),
        "nothing": whole[:0],
        "apart": torch.zeros(6, 4),
        "meta": torch.zeros(6, 4, device="meta"),
    }
    found = sharing_memory((name, nn.Parameter(tensor)) for name, tensor in tensors.items())
    assert {frozenset(pair) for pair in found} == {
        frozenset(pair)
        for pair in [
            ("top", "middle"),
            ("bottom", "middle"),
            ("bottom", "left"),
            ("bottom", "right"),
            ("bottom", "turned"),
            ("right", "turned"),
        ]
    }


def as_zero(layers, group):
    Zero(nn.Sequential(*layers), 2, group=group)


def as_pipeline(layers, group):
    pipeline.Pipeline(layers, schedules.gpipe(2, 2), squared_error, group=group)


def as_tensor_parallel(layers, group):
    parallelize(nn.Sequential(*layers), mlp_plan(), group)


def refused(function):
    """On a rank: the error."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2 and function is not as_pipeline:
        return None
    torch.manual_seed(0)
    layers = models.mlp(2, 4, 8)
    layers[1].up.weight.data = layers[0].up.weight.data  # "tied", for an optimizer in one process
    with pytest.raises(ValueError) as told:
        function(layers, group) if rank < 2 else pipeline.join_group_creation()
    return str(told.value)


@pytest.mark.parametrize("function", [as_zero, as_pipeline, as_tensor_parallel])
def test_shared_memory_is_refused_on_every_rank(five, function):
    for told in five.call(refused, function)[:2]:
        assert told.startswith("parameters 0.up.weight and 1.up.weight share memory")
