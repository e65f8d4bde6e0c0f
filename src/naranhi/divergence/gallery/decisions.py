"""Who decides for the whole model? One rank sees only a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from naranhi.distributed import Mesh, device_of
from naranhi.divergence.gallery import toys
from naranhi.divergence.gallery.bug import Bug, Case, Expected
from naranhi.tensor_parallel import clip_grad_norm_, mlp_plan, parallelize

MAX_NORM = 0.1


def _split_case(run, update, run_alone, update_alone):
    """Return the case of an MLP split over tensor ranks."""
    mesh, layers = Mesh(tensor=dist.get_world_size()), toys.mlp()
    parallelize(layers, mlp_plan(), mesh.tensor)
    return Case(toys.mlp(), run_alone, layers, run, mesh, update, update_alone)


# --- a gradient norm of a shard -------------------------------------------------------------------


def clip_shard(layers: Sequence[nn.Module]) -> None:
    """Clip by the norm of the gradients that this rank holds."""
    nn.utils.clip_grad_norm_(nn.ModuleList(layers).parameters(), MAX_NORM)


def clip_model(layers: Sequence[nn.Module]) -> None:
    """Clip by the norm of the whole model, whose parts the ranks hold."""
    clip_grad_norm_(nn.ModuleList(layers), MAX_NORM)


def clipping_case(clip: Callable[[Sequence[nn.Module]], None]) -> Case:
    """Return the case of an MLP split over tensor ranks, with clipping."""

    def update(layers):
        clip(layers)
        toys.sgd(layers)

    def update_alone(layers):
        clip_shard(layers)  # one process holds everything
        toys.sgd(layers)

    return _split_case(toys.regression_alone, update, toys.regression_alone, update_alone)


NORM_OF_A_SHARD = Bug(
    name="norm of a shard",
    symptom="the gradient norm that is logged depends on the rank, and on how many ranks there are",
    hint="of which parameters is it the norm?",
    wrong=clip_shard,
    right=clip_model,
    make=clipping_case,
    expected=Expected("norm", "1.down.bias", "tensor"),
    reports=(
        "https://github.com/areal-project/AReaL/issues/312",
        "https://github.com/pytorch/pytorch/issues/72548",
    ),
)


# --- a step skipped on one rank only --------------------------------------------------------------


def own_overflow(layers: Sequence[nn.Module]) -> bool:
    """Return whether a gradient that this rank holds is infinite or NaN."""
    params = nn.ModuleList(layers).parameters()
    return any(not param.grad.isfinite().all() for param in params)


def any_overflow(layers: Sequence[nn.Module]) -> bool:
    """Return whether a gradient is infinite or NaN on any rank."""
    flag = torch.tensor(float(own_overflow(layers)), device=device_of())
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def overflow_case(overflow: Callable[[Sequence[nn.Module]], bool]) -> Case:
    """Return the case of an MLP split over tensor ranks; every fourth step a gradient overflows.

    The overflow is set by hand; in fp16 it comes from a loss scale that is too large.
    """

    def run(layers, step):
        loss = toys.regression_alone(layers, step)
        last = dist.get_rank() == dist.get_world_size() - 1
        if step % 4 == 0 and (last or isinstance(layers[1].up, nn.Linear)):
            layers[1].up.weight.grad[-1] = torch.inf
        return loss

    def update(layers):
        if not overflow(layers):
            toys.sgd(layers)

    def update_alone(layers):
        if not own_overflow(layers):
            toys.sgd(layers)

    return _split_case(run, update, run, update_alone)


LONELY_SKIP = Bug(
    name="lonely skip",
    symptom="from the first overflow on, the loss is another than one process's",
    hint="the rank whose gradients overflowed skips the step: do the others know?",
    wrong=own_overflow,
    right=any_overflow,
    make=overflow_case,
    expected=Expected("step", "", "tensor", "not the last"),
    reports=(
        "https://github.com/facebookresearch/fairscale/issues/180",
        "https://github.com/facebookresearch/fairscale/pull/179",
        "https://github.com/pytorch/pytorch/pull/115710",
    ),
)
