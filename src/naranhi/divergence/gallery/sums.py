"""Who sums what? Partial gradients that nobody sums, or that only some copies receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from naranhi import models, schedules
from naranhi.distributed import Mesh
from naranhi.divergence.gallery import toys
from naranhi.divergence.gallery.bug import Bug, Case, Expected
from naranhi.pipeline import Pipeline
from naranhi.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_group,
    gpt2_plan,
    parallelize,
    reduce_from_group,
    sum_sequence_gradients,
    vocabulary_cross_entropy,
)

# --- an all-reduce that autograd does not see -----------------------------------------------------


class SplitBlock(nn.Module):
    """An MLP block of which each rank of the world has some neurons.

    Args:
        block: the unsplit block.
        run: `run(self, x)` computes x + down(gelu(up(x))) with its all-reduces.
    """

    up: ColumnParallelLinear
    down: RowParallelLinear
    run: Callable[[SplitBlock, torch.Tensor], torch.Tensor]

    def __init__(
        self, block: nn.Module, run: Callable[[SplitBlock, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(block.up), RowParallelLinear(block.down)
        self.up.sends = False  # `run` communicates
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `run(self, x)`."""
        return self.run(self, x)


def in_place(block: SplitBlock, x: torch.Tensor) -> torch.Tensor:
    """Sum the ranks' products in place, which autograd does not see."""
    y = F.gelu(block.up(x)) @ block.down.weight.t()
    dist.all_reduce(y.data)
    return x + y + block.down.bias


def in_pairs(block: SplitBlock, x: torch.Tensor) -> torch.Tensor:
    """Sum the ranks' products, and in the backward the gradients of x."""
    y = F.gelu(block.up(copy_to_group(x))) @ block.down.weight.t()
    return x + reduce_from_group(y) + block.down.bias


def split_case(run: Callable[[SplitBlock, torch.Tensor], torch.Tensor]) -> Case:
    """Return the case of an MLP whose blocks are split over tensor ranks by hand."""
    mesh = Mesh(tensor=dist.get_world_size())
    layers: list[nn.Module] = [SplitBlock(block, run) for block in toys.mlp()]
    return Case(
        toys.mlp(),
        toys.regression_alone,
        layers,
        toys.regression_alone,
        mesh,
        toys.sgd,
        toys.sgd,
    )


MISSING_BACKWARD = Bug(
    name="missing backward",
    symptom="the loss falls nearly as it should; the more layers, the less it does",
    hint="what is the gradient of an input that every rank uses for its own neurons?",
    wrong=in_place,
    right=in_pairs,
    make=split_case,
    expected=Expected("backward", "0", "tensor"),
    reports=(
        "https://github.com/lucidrains/vector-quantize-pytorch/issues/158",
        "https://github.com/verl-project/verl-SpeCo/pull/29",
    ),
)


# --- a tied weight updated on one end -------------------------------------------------------------


def copy_weight(layers: list[nn.Module]) -> None:
    """Give the head a copy of the embedding's weight, so that the last stage has one."""
    layers[-1].lm_head.weight = nn.Parameter(layers[0].wte.weight.detach().clone())


def tie_weight(layers: list[nn.Module]) -> None:
    """Give the head the embedding's weight: a pipeline then sums the gradients of both ends."""
    layers[-1].lm_head.weight = layers[0].wte.weight


def tied_case(tie: Callable[[list[nn.Module]], None]) -> Case:
    """Return the case of a GPT-2 in a pipeline, whose first and last stage share a weight."""
    mesh, layers = Mesh(pipeline=dist.get_world_size()), toys.gpt2()
    tie(layers)
    schedule = schedules.one_f_one_b(mesh.sizes.pipeline, 2)
    pipeline = Pipeline(layers, schedule, models.loss, group=mesh.pipeline)

    def run(pipeline, step):
        return toys.total(pipeline.step(*toys.text(step)))

    def update(pipeline):
        toys.sgd([*pipeline.stages.values()])

    return Case(toys.gpt2(), toys.text_alone, pipeline, run, mesh, update, toys.sgd)


TIED_WEIGHT = Bug(
    name="tied weight",
    symptom="a checkpoint's embedding and head differ, although the configuration ties them",
    hint="how many copies of the embedding's weight are there, and which gradients does each get?",
    wrong=copy_weight,
    right=tie_weight,
    make=tied_case,
    expected=Expected("gradient", "0.wte.weight", "pipeline", "ends"),
    reports=(
        "https://github.com/uw-syfi/piper/issues/13",
        "https://github.com/cornstarch-org/Cornstarch/pull/16",
    ),
)


# --- a norm's gradient not summed under sequence parallelism --------------------------------------


def backward(loss: torch.Tensor, layers: Sequence[nn.Module]) -> None:
    """Run the backward."""
    loss.backward()


def backward_and_sum(loss: torch.Tensor, layers: Sequence[nn.Module]) -> None:
    """Run the backward, and sum gradients that cover one rank's tokens: norms, some biases."""
    loss.backward()
    sum_sequence_gradients(layers)


def sequence_case(end: Callable[[torch.Tensor, Sequence[nn.Module]], None]) -> Case:
    """Return the case of a GPT-2 split over tensor ranks, with sequence parallelism."""
    mesh, layers = Mesh(tensor=dist.get_world_size()), toys.gpt2()
    parallelize(layers, gpt2_plan(), mesh.tensor, sequence=True)

    def run(layers, step):
        tokens, targets, count = toys.text(step)
        logits = toys.forward(layers, tokens)
        loss = vocabulary_cross_entropy(logits, targets, mesh.tensor) / count
        end(loss, layers)
        return loss.item()

    return Case(toys.gpt2(), toys.text_alone, layers, run, mesh, toys.sgd, toys.sgd)


UNSUMMED_NORM = Bug(
    name="unsummed norm",
    symptom="the norms' weights in the ranks' checkpoints are not the same",
    hint="a norm sees this rank's tokens only: is the gradient of its weight one of all tokens?",
    wrong=backward,
    right=backward_and_sum,
    make=sequence_case,
    expected=Expected("gradient", "3.ln_f.bias", "tensor"),
    reports=(
        "https://github.com/NVIDIA/Megatron-LM/issues/1446",
        "https://github.com/EleutherAI/gpt-neox/pull/1257",
        "https://github.com/EleutherAI/gpt-neox/pull/1259",
    ),
)


# --- around the wrapper ---------------------------------------------------------------------------


def around(parallel: DistributedDataParallel, x: torch.Tensor) -> torch.Tensor:
    """Call the wrapped model directly, for example to use one of its methods."""
    return parallel.module(x)


def through(parallel: DistributedDataParallel, x: torch.Tensor) -> torch.Tensor:
    """Call the wrapper, which prepares the backward's all-reduces."""
    return parallel(x)


def wrapper_case(
    call: Callable[[DistributedDataParallel, torch.Tensor], torch.Tensor],
) -> Case:
    """Return the case of an MLP in torch's DistributedDataParallel, which averages gradients."""
    mesh = Mesh(data=dist.get_world_size())
    parallel = DistributedDataParallel(nn.Sequential(*toys.mlp()), process_group=mesh.data)

    def run(parallel, step):
        inputs, targets = toys.regression(step)
        share, wanted = (x.chunk(mesh.sizes.data)[mesh.place.data] for x in (inputs, targets))
        loss = toys.squared_error(call(parallel, share), wanted) / targets.numel()
        (loss * mesh.sizes.data).backward()
        return toys.total(loss)

    return Case(
        *(toys.mlp(), toys.regression_alone, parallel, run, mesh, toys.sgd, toys.sgd),
        scale=mesh.sizes.data,
    )


AROUND_THE_WRAPPER = Bug(
    name="around the wrapper",
    symptom="the loss falls on every rank, the network is idle, and each rank has other weights",
    hint="who calls whom, and what would the one that is passed over have done?",
    wrong=around,
    right=through,
    make=wrapper_case,
    expected=Expected("gradient", "1.down.bias", "data"),
    reports=(
        "https://github.com/intel/e2eAIOK/pull/198",
        "https://github.com/pytorch/pytorch/pull/20282",
    ),
)
