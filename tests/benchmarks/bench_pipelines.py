"""Our pipelines beside torch's own schedules and torchgpipe: two ranks, 8 blocks, 8 micro-batches.

The limit is T(m + p - 1)/(mp) for p stages and m micro-batches, T being the time in which one
process does all the micro-batches, with as many threads as a rank has, measured in the same turns.
Both ranks measure it at once, since a pipeline keeps both cores busy too.

torchgpipe runs in one process, with a thread for each stage. Rank 1 leaves the cores to it.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torchgpipe import GPipe

from naranhi import models, pipeline, schedules
from tests.benchmarks.harness import Contenders, Work

RANKS, BLOCKS, MICROBATCHES, ROWS = 2, 8, 8, 256


def works():
    return [Work(f"GPipe, width {width}", RANKS, gpipe, (width,), memory=width == 512)
            for width in (512, 32)]


def gpipe(group, width):
    training = Training(width, dist.get_rank(group))
    runs = {
        "naranhi": training.naranhi(schedules.gpipe(RANKS, MICROBATCHES), group),
        "torch ScheduleGPipe": training.torch(ScheduleGPipe, group),
        "torchgpipe": training.torchgpipe(),
    }
    scale = (MICROBATCHES + RANKS - 1) / (MICROBATCHES * RANKS)
    return Contenders(runs, training.alone, tolerance=1e-6, limit_scale=scale)


class Training:
    """One model and one batch for all contenders; a run returns the gradients of the rank's
    half."""

    def __init__(self, width, rank):
        torch.manual_seed(0)
        self.layers, self.rank = models.mlp(BLOCKS, width), rank
        self.inputs, self.targets = torch.randn(2, ROWS, width)
        self.count = ROWS * width

    def copy(self):
        return copy.deepcopy(self.layers)

    def half(self, layers):
        return nn.Sequential(*layers[self.rank * BLOCKS // 2:][:BLOCKS // 2])

    def loss(self, output, target):
        return squared_error(output, target) / self.count

    def naranhi(self, schedule, group):
        pipe = pipeline.Pipeline(self.copy(), schedule, squared_error, group=group)

        def run():
            clear(pipe.parameters())
            pipe.step(self.inputs, self.targets, self.count)
            return gradients(pipe.parameters())

        return run

    def torch(self, kind, group):
        module = self.half(self.copy())
        stage = PipelineStage(module, self.rank, RANKS, torch.device("cpu"), group=group)
        engine = kind(stage, MICROBATCHES, loss_fn=self.loss, scale_grads=False)

        def run():
            clear(module.parameters())
            if self.rank == 0:
                engine.step(self.inputs, return_outputs=False)
            else:
                engine.step(target=self.targets, losses=[], return_outputs=False)
            return gradients(module.parameters())

        return run

    def torchgpipe(self):
        layers = self.copy()
        engine = GPipe(nn.Sequential(*layers), [BLOCKS // 2] * RANKS, devices=["cpu"] * RANKS,
                       chunks=MICROBATCHES, checkpoint="never")
        mine = self.half(layers)
        ran = False

        def run():
            nonlocal ran
            if self.rank == 0 or not ran:  # once on rank 1 too, so that its half is compared
                ran = True
                clear(engine.parameters())
                self.loss(engine(self.inputs), self.targets).backward()
            return gradients(mine.parameters())

        return run

    def alone(self):
        """One process, all layers, a micro-batch after the other."""
        model = nn.Sequential(*self.layers)
        clear(model.parameters())
        for x, y in zip(self.inputs.chunk(MICROBATCHES), self.targets.chunk(MICROBATCHES),
                        strict=True):
            self.loss(model(x), y).backward()


def squared_error(output, target):
    return (output - target).square().sum()


def clear(parameters):
    for parameter in parameters:
        parameter.grad = None


def gradients(parameters):
    return [parameter.grad for parameter in parameters]
