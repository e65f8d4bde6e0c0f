"""Our data parallelism beside the production engines: two ranks, 8 blocks, 64 rows on each rank.

The limit is the larger of computing, a forward and a backward of a rank's share alone on all ranks
at once, and of moving the bytes that an all-reduce of the gradients must send; which of the two is
larger is measured first.

`DistributedDataParallel` and DeepSpeed average over the ranks what ours adds up, so their losses
are multiplied by the number of ranks. DeepSpeed (stage 0) begins to add up when its backward has
ended; its step is a whole one, with the optimizer's, which here takes the gradients and does
nothing.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from naranhi import data_parallel, measure, models
from naranhi.measure import baselines
from tests.benchmarks.bench_collectives import shift
from tests.benchmarks.harness import Contenders, Work

RANKS, BLOCKS, ROWS = 2, 8, 64


def works():
    return [
        Work(f"data parallel, width {width}", RANKS, contenders, (width,)) for width in (512, 32)
    ]


def contenders(group, width):
    training = Training(width, group)
    make = {
        "naranhi": training.naranhi,
        "torch DistributedDataParallel": training.torch,
        "DeepSpeed stage 0": training.deepspeed,
    }
    moving = shift("all_reduce", training.bytes, group)
    return Contenders(make, larger(training.alone(), moving, group), tolerance=1e-6)


def larger(computing, moving, group):
    """Which of the two takes longer, on the rank for which it does."""
    runs = {computing: computing, moving: moving}
    times = measure.interleaved(runs, repeats=5, group=group)
    return max(runs, key=lambda run: measure.median(times[run]))


class Training:
    """One model for all contenders and a share of the batch for each rank. A run returns the
    gradients of the whole batch's loss."""

    def __init__(self, width, group):
        torch.manual_seed(0)
        self.model, self.group = nn.Sequential(*models.mlp(BLOCKS, width)), group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        inputs, targets = torch.randn(2, self.ranks, ROWS, width)
        self.inputs, self.targets = inputs[self.rank], targets[self.rank]
        self.count = targets.numel()
        self.bytes = sum(one.nbytes for one in self.model.parameters())

    def loss(self, model):
        return (model(self.inputs) - self.targets).square().sum() / self.count

    def alone(self):
        model = copy.deepcopy(self.model)

        def run():
            model.zero_grad()
            self.loss(model).backward()

        return run

    def naranhi(self):
        model = copy.deepcopy(self.model)
        data_parallel.DDP(model, self.group)  # which the model keeps

        def run():
            model.zero_grad()
            self.loss(model).backward()
            return gradients(model)

        return run

    def torch(self):
        model = DistributedDataParallel(
            copy.deepcopy(self.model),
            process_group=self.group,
            gradient_as_bucket_view=True,
            static_graph=True,
        )

        def run():
            model.zero_grad()
            (self.ranks * self.loss(model)).backward()
            return gradients(model)

        return run

    def deepspeed(self):
        os.environ["LOCAL_RANK"] = str(self.rank)
        deepspeed = baselines.deepspeed()
        deepspeed.utils.logger.setLevel("ERROR")

        class Take(torch.optim.SGD):
            def step(self, closure=None):
                self.taken = gradients(model)

        model = copy.deepcopy(self.model)
        optimizer = Take(model.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": 0},
                "steps_per_print": 10**9,
            },
        )

        def run():
            engine.backward(self.ranks * self.loss(engine))
            engine.step()
            return optimizer.taken

        return run


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]
