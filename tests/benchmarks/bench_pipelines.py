"""Our pipelines beside the production engines: two ranks, 8 blocks, 8 micro-batches of 32 rows.

The limit is that of the schedule: T(m + p - 1)/(mp) for p stages and m micro-batches, T being the
time in which one process does all the micro-batches, with as many threads as a rank has, measured
in the same turns; p - 1 divided by the chunks if stages are interleaved, and by 3 if the backward
is split, which supposes that forward and both halves of the backward take as long, as the products
in them do. A V then waits for nothing: T/p. Both ranks measure T at once, since a pipeline keeps
both cores busy too.

torchgpipe runs in one process, with a thread for each stage: rank 1 leaves the cores to it.
DeepSpeed's step is a whole one, with the optimizer's, which here takes the gradients and does
nothing.
"""

import copy
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torchgpipe import GPipe

from naranhi import models, pipeline, schedules
from naranhi.autograd import splittable
from naranhi.measure import baselines
from tests.benchmarks.harness import Contenders, Work

RANKS, BLOCKS, MICROBATCHES, ROWS = 2, 8, 8, 256


def works():
    kinds = {
        "GPipe": gpipe,
        "1F1B": one_f_one_b,
        "interleaved": interleaved,
        "zero-bubble": zero_bubble,
        "V-shaped": v_shaped,
    }
    return [
        Work(f"{name}, width {width}", RANKS, kind, (width,), memory=width == 512)
        for name, kind in kinds.items()
        for width in (512, 32)
    ]


def gpipe(group, width):
    training = Training(width, group)
    make = {
        "naranhi": partial(training.naranhi, schedules.gpipe(RANKS, MICROBATCHES)),
        "torch ScheduleGPipe": partial(training.torch, ScheduleGPipe),
        "torchgpipe": training.torchgpipe,
    }
    return training.contenders(make, waiting=RANKS - 1)


def one_f_one_b(group, width):
    training = Training(width, group)
    make = {
        "naranhi": partial(training.naranhi, schedules.one_f_one_b(RANKS, MICROBATCHES)),
        "torch Schedule1F1B": partial(training.torch, Schedule1F1B),
        "DeepSpeed": training.deepspeed,
    }
    return training.contenders(make, waiting=RANKS - 1)


def interleaved(group, width):
    training = Training(width, group, chunks=2)
    make = {
        "naranhi": partial(training.naranhi, schedules.interleaved(RANKS, MICROBATCHES, 2)),
        "torch ScheduleInterleaved1F1B": partial(training.torch, ScheduleInterleaved1F1B),
    }
    return training.contenders(make, waiting=(RANKS - 1) / 2)


def zero_bubble(group, width):
    training = Training(width, group)
    h1, h2 = (
        schedule(RANKS, MICROBATCHES)
        for schedule in (schedules.zero_bubble_h1, schedules.zero_bubble_h2)
    )
    make = {
        "naranhi H1": partial(training.naranhi, h1, splittable),
        "naranhi H2": partial(training.naranhi, h2, splittable),
        "torch ScheduleInterleavedZeroBubble": partial(
            training.torch, ScheduleInterleavedZeroBubble
        ),
    }
    return training.contenders(make, waiting=(RANKS - 1) / 3)


def v_shaped(group, width):
    """DualPipeV's pairs run one after the other, ours as torch's: there is nothing to overlap."""
    training = Training(width, group, chunks=2, v=True)
    zero, dual = (
        schedule(RANKS, MICROBATCHES)
        for schedule in (schedules.zero_bubble_v, schedules.dualpipe_v)
    )
    make = {
        "naranhi ZB-V": partial(training.naranhi, zero, splittable),
        "naranhi DualPipeV": partial(training.naranhi, dual, splittable),
        "torch ScheduleZBVZeroBubble": partial(training.torch, ScheduleZBVZeroBubble),
        "torch ScheduleDualPipeV": partial(training.torch, ScheduleDualPipeV),
    }
    return training.contenders(make, waiting=0)


class Training:
    """One model and one batch for all contenders. A run returns the gradients of the rank's layers,
    which are `chunks` equal parts of the model, dealt out in turn or, in a V, down and back up."""

    def __init__(self, width, group, chunks=1, v=False):
        torch.manual_seed(0)
        self.layers, self.group, self.rank = models.mlp(BLOCKS, width), group, dist.get_rank(group)
        self.inputs, self.targets = torch.randn(2, ROWS, width)
        self.count, self.stages = ROWS * width, RANKS * chunks
        self.numbers = (
            [self.rank, self.stages - 1 - self.rank] if v else range(self.rank, self.stages, RANKS)
        )

    def contenders(self, make, waiting):
        """waiting: for how many micro-batches' time a rank has nothing to do, at least."""
        scale = (MICROBATCHES + waiting) / (MICROBATCHES * RANKS)
        return Contenders(make, self.alone, tolerance=1e-6, limit_scale=scale)

    def mine(self):
        """The rank's parts of a copy of the model, {virtual stage: module}."""
        parts = pipeline.cut(copy.deepcopy(self.layers), self.stages)
        return {stage: nn.Sequential(*parts[stage]) for stage in self.numbers}

    def loss(self, output, target):
        return squared_error(output, target) / self.count

    def naranhi(self, schedule, prepare=list):
        layers = prepare(copy.deepcopy(self.layers))
        pipe = pipeline.Pipeline(layers, schedule, squared_error, group=self.group)

        def run():
            clear(pipe.parameters())
            pipe.step(self.inputs, self.targets, self.count)
            return gradients(pipe.parameters())

        return run

    def torch(self, kind):
        mine = self.mine()
        stages = [
            PipelineStage(module, stage, self.stages, torch.device("cpu"), group=self.group)
            for stage, module in mine.items()
        ]
        single = kind in (ScheduleGPipe, Schedule1F1B)
        engine = kind(
            stages[0] if single else stages, MICROBATCHES, loss_fn=self.loss, scale_grads=False
        )
        parameters = list(nn.ModuleList(mine.values()).parameters())

        def run():
            clear(parameters)
            first = [self.inputs] if 0 in mine else []
            last = {"target": self.targets, "losses": []} if self.stages - 1 in mine else {}
            engine.step(*first, **last, return_outputs=False)
            return gradients(parameters)

        return run

    def torchgpipe(self):
        layers = copy.deepcopy(self.layers)
        engine = GPipe(
            nn.Sequential(*layers),
            [BLOCKS // RANKS] * RANKS,
            devices=["cpu"] * RANKS,
            chunks=MICROBATCHES,
            checkpoint="never",
        )
        mine = nn.Sequential(*pipeline.cut(layers, RANKS)[self.rank])
        ran = False

        def run():
            nonlocal ran
            if self.rank == 0 or not ran:  # once on rank 1 too, so that its half is compared
                ran = True
                clear(engine.parameters())
                self.loss(engine(self.inputs), self.targets).backward()
            return gradients(mine.parameters())

        return run

    def deepspeed(self):
        os.environ["LOCAL_RANK"] = str(self.rank)
        deepspeed = baselines.deepspeed()
        deepspeed.utils.logger.setLevel("ERROR")

        class Take(torch.optim.SGD):
            def step(self, closure=None):
                self.taken = gradients(module.parameters())

        module = deepspeed.PipelineModule(
            copy.deepcopy(self.layers),
            num_stages=RANKS,
            partition_method="uniform",
            # DeepSpeed divides by the number of micro-batches.
            loss_fn=lambda output, target: MICROBATCHES * self.loss(output, target),
        )
        optimizer = Take(module.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": ROWS // MICROBATCHES,
                "gradient_accumulation_steps": MICROBATCHES,
                "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
            },
        )
        pieces = list(
            zip(self.inputs.chunk(MICROBATCHES), self.targets.chunk(MICROBATCHES), strict=True)
        )

        def run():
            engine.train_batch(iter(pieces))
            return optimizer.taken

        return run

    def alone(self):
        """One process, all layers, a micro-batch after the other."""
        model = nn.Sequential(*self.layers)
        clear(model.parameters())
        for x, y in zip(
            self.inputs.chunk(MICROBATCHES), self.targets.chunk(MICROBATCHES), strict=True
        ):
            self.loss(model(x), y).backward()


def squared_error(output, target):
    return (output - target).square().sum()


def clear(parameters):
    for parameter in parameters:
        parameter.grad = None


def gradients(parameters):
    return [parameter.grad for parameter in parameters]
