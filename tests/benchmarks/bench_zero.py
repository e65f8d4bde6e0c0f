"""Our ZeRO-3 beside the production engines: two ranks, 8 blocks, 64 rows on each rank, fp32.

A run is a whole step, with that of SGD, which DeepSpeed cannot leave out. What is compared is how
far the first one moved the parameters, gathered whole.

The limit is the larger of computing, a forward and a backward of a rank's share alone on all ranks
at once, and of moving what ZeRO-3 must: parameters gathered twice, gradients reduced and scattered.

The peers average over the ranks what ours adds up, so their losses are multiplied by the number of
ranks. As it is by default, DeepSpeed shards no parameter of less than 100,000 numbers, and keeps a
billion of them gathered until the backward has used them again: that is all of these models, and
much faster than to free them. To compare like with like it is also measured with those limits set
to what the others hold: none whole, two blocks gathered.

Ours likewise: with a unit for each block, and as its documentation has it for small ones, joined
until a unit has 2**15 numbers, which is four of the narrow blocks (and one wide one). A work of its
own has `fully_shard` applied to the same units.
"""

import copy
import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from naranhi import zero
from naranhi.measure import baselines
from naranhi.zero import joined
from tests.benchmarks.bench_collectives import shift
from tests.benchmarks.bench_data_parallel import ROWS, Training, larger
from tests.benchmarks.harness import Contenders, Work

RANKS = 2
RATE = 0.1


def works():
    return [
        Work("ZeRO-3, width 512", RANKS, contenders, (512,), memory=True),
        Work("ZeRO-3, width 32", RANKS, contenders, (32,)),
        Work("ZeRO-3, width 32, the same units joined", RANKS, both_joined, (32,)),
    ]


def contenders(group, width):
    training = Sharded(width, group)
    return beside_limit(
        group,
        training,
        {
            "naranhi, small blocks joined": partial(training.naranhi, joined),
            "naranhi, a unit for each block": partial(training.naranhi, list),
            "torch fully_shard": partial(training.torch, list),
            "DeepSpeed stage 3, sharding all": partial(
                training.deepspeed,
                {
                    "stage3_param_persistence_threshold": 0,
                    "stage3_max_reuse_distance": 0,
                    "stage3_max_live_parameters": 2 * training.block,
                    "stage3_prefetch_bucket_size": training.block,
                },
            ),
            "DeepSpeed stage 3": partial(training.deepspeed, {}),
        },
    )


def both_joined(group, width):
    training = Sharded(width, group)
    return beside_limit(
        group,
        training,
        {
            "naranhi": partial(training.naranhi, joined),
            "torch fully_shard": partial(training.torch, joined),
        },
    )


def beside_limit(group, training, make):
    gather, scatter = (
        shift(name, training.bytes, group) for name in ("all_gather", "reduce_scatter")
    )

    def moving():
        gather()
        gather()
        scatter()

    return Contenders(make, larger(training.alone(), moving, group), tolerance=1e-7)


class Sharded(Training):
    """A run returns a function that gives by how much the parameters have moved, whole."""

    def __init__(self, width, group):
        super().__init__(width, group)
        self.start = [one.detach().clone() for one in self.model.parameters()]
        self.block = sum(one.numel() for one in self.model[0].parameters())

    def moved(self, parameters):
        return [one.detach() - start for one, start in zip(parameters, self.start, strict=True)]

    def naranhi(self, units):
        model = copy.deepcopy(self.model)
        sharded = zero.Zero(model, 3, units=units(model), group=self.group)
        optimizer = torch.optim.SGD(sharded.param_groups, lr=RATE)

        def run():
            self.loss(model).backward()
            sharded.step(optimizer)
            optimizer.zero_grad()
            return whole

        def whole():
            with sharded.gathered():
                return self.moved(model.parameters())

        return run

    def torch(self, units):
        model = copy.deepcopy(self.model)
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # as in bench_tensor_parallel
        for unit in units(model):
            fully_shard(list(unit) if isinstance(unit, tuple) else unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def run():
            (self.ranks * self.loss(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
            return whole

        def whole():
            return self.moved([one.full_tensor() for one in model.parameters()])

        return run

    def deepspeed(self, options):
        os.environ["LOCAL_RANK"] = str(self.rank)
        deepspeed = baselines.deepspeed()
        deepspeed.utils.logger.setLevel("ERROR")
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": 3, **options},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
        )

        def run():
            engine.backward(self.ranks * self.loss(engine))
            engine.step()
            return whole

        def whole():
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                return self.moved(model.parameters())

        return run
