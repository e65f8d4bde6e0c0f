"""Which division? A loss or a gradient is divided by a number that is not the whole step's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from naranhi import models, schedules
from naranhi.distributed import Mesh
from naranhi.divergence.gallery import toys
from naranhi.divergence.gallery.bug import Bug, Case, Expected
from naranhi.pipeline import Pipeline

MICROBATCHES = 4


# --- the mean of micro-batch means ----------------------------------------------------------------


def mean_of_means(targets: torch.Tensor) -> tuple[Callable[..., torch.Tensor], float]:
    """Return a micro-batch's loss and its divisor: the mean, and the number of micro-batches."""
    return lambda logits, some: F.cross_entropy(logits.flatten(0, 1), some.flatten()), MICROBATCHES


def sum_over_step(targets: torch.Tensor) -> tuple[Callable[..., torch.Tensor], float]:
    """Return a micro-batch's loss and its divisor: the sum, and the step's valid targets."""
    return models.loss, int((targets != models.IGNORE_INDEX).sum())


def pipeline_case(divide: Callable[[torch.Tensor], tuple[Callable[..., Any], float]]) -> Case:
    """Return the case of a GPT-2 in a pipeline, whose loss `divide` chooses."""
    mesh = Mesh(pipeline=dist.get_world_size())
    loss, _ = divide(toys.text(0)[1])
    schedule = schedules.one_f_one_b(mesh.sizes.pipeline, MICROBATCHES)
    pipeline = Pipeline(toys.gpt2(), schedule, loss, group=mesh.pipeline)

    def run(pipeline, step):
        tokens, targets, _ = toys.text(step)
        return toys.total(pipeline.step(tokens, targets, divide(targets)[1]))

    def update(pipeline):
        toys.sgd([*pipeline.stages.values()])

    return Case(toys.gpt2(), toys.text_alone, pipeline, run, mesh, update, toys.sgd)


MEAN_OF_MEANS = Bug(
    name="mean of means",
    symptom="with more micro-batches of the same batch, loss and gradient norm are others",
    hint="rows differ in length: does a token of a short row count as much as one of a long row?",
    wrong=mean_of_means,
    right=sum_over_step,
    make=pipeline_case,
    expected=Expected("backward", "3.lm_head", None, "last"),
    reports=(
        "https://github.com/huggingface/transformers/pull/34191",
        "https://github.com/huggingface/blog/pull/2414",
    ),
)


# --- a gradient averaged where it must be summed --------------------------------------------------


def average(layers: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Average gradients over the ranks of a group."""
    for param in nn.ModuleList(layers).parameters():
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)


def add_up(layers: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Sum gradients of losses that are already divided by the whole batch's count."""
    for param in nn.ModuleList(layers).parameters():
        dist.all_reduce(param.grad, group=group)


def data_parallel_case(reduce: Callable[[Sequence[nn.Module], dist.ProcessGroup], None]) -> Case:
    """Return the case of an MLP on shares of a batch, whose gradients `reduce` reduces."""
    mesh = Mesh(data=dist.get_world_size())

    def run(layers, step):
        inputs, targets = toys.regression(step)
        share, wanted = (x.chunk(mesh.sizes.data)[mesh.place.data] for x in (inputs, targets))
        loss = toys.squared_error(toys.forward(layers, share), wanted) / targets.numel()
        loss.backward()
        reduce(layers, mesh.data)
        return toys.total(loss)

    return Case(toys.mlp(), toys.regression_alone, toys.mlp(), run, mesh, toys.sgd, toys.sgd)


DIVIDED_TWICE = Bug(
    name="divided twice",
    symptom="the loss falls more slowly with every rank that is added, as if the rate were lower",
    hint="who divides by the number of ranks, and has anybody divided before?",
    wrong=average,
    right=add_up,
    make=data_parallel_case,
    expected=Expected("gradient", "1.down.bias", "data"),
    reports=(
        "https://github.com/deepspeedai/DeepSpeed/pull/5555",
        "https://github.com/meta-pytorch/torchtune/pull/2172",
    ),
)
