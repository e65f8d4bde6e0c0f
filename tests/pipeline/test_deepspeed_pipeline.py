"""DeepSpeed's pipeline engine and our 1F1B: one model, one cut, one loss, step after step."""

import os

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import Ranks

from naranhi import data, models, pipeline, schedules
from naranhi.measure import baselines

STEPS, ROWS, MICROBATCHES, BALANCE = 20, 16, 8, [4, 3, 3, 4]


@pytest.fixture(scope="module")
def four():
    """DeepSpeed takes the whole world, so these are just as many as there are stages."""
    with Ranks(4, deadline=120.0) as ranks:
        yield ranks


def batches():
    """Padded batches, whose micro-batches differ in how many of their tokens are valid."""
    passages = data.unique(data.contexts())[:200]
    sequences = data.encode(data.tokenizer(), passages, 48)
    return data.stream(sequences, ROWS, batching=data.at_random)


def gpt2():
    torch.manual_seed(0)
    return models.gpt2(tied=False, dropout=0.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def valid(batch):
    return int((batch.targets != models.IGNORE_INDEX).sum())


def ours():
    found, last = [], dist.get_rank() == 3
    schedule = schedules.one_f_one_b(4, MICROBATCHES)
    with pipeline.Pipeline(gpt2(), schedule, models.loss, balance=BALANCE) as pipe:
        optimizer = sgd(pipe.parameters())
        for _, batch in zip(range(STEPS), batches(), strict=False):
            optimizer.zero_grad()
            loss = pipe.step(batch.tokens, batch.targets, valid(batch))
            optimizer.step()
            found.append(loss.item() if last else None)
    return found


def engine(deepspeed, **config):
    def loss(logits, labels):
        targets, scale = labels
        return models.loss(logits, targets) * scale

    module = deepspeed.PipelineModule(
        gpt2(), num_stages=4, loss_fn=loss, partition_method="type:GPT2Block"
    )
    return deepspeed.initialize(
        model=module,
        optimizer=sgd(module.parameters()),
        config={"gradient_clipping": 0.0, **config},
    )[0]  # the default is 1.0


def deepspeeds():
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed = baselines.deepspeed()
    trained = engine(
        deepspeed, train_batch_size=ROWS, train_micro_batch_size_per_gpu=ROWS // MICROBATCHES
    )
    found = []
    for _, batch in zip(range(STEPS), batches(), strict=False):
        scale = torch.tensor(MICROBATCHES / valid(batch))  # it divides by MICROBATCHES again
        parts = zip(
            batch.tokens.chunk(MICROBATCHES), batch.targets.chunk(MICROBATCHES), strict=True
        )
        found.append(trained.train_batch(iter([(x, (y, scale)) for x, y in parts])).item())
    return [int(part) for part in trained.module.parts], trained.micro_batches, found


def test_the_losses_are_deepspeeds(four):
    expected = four.call(deepspeeds)
    found = four.call(ours)[3]
    assert found[-1] < found[0] - 0.5  # they have learnt something
    for parts, microbatches, losses in expected:
        assert parts == [0, 4, 7, 10, 14]
        assert microbatches == MICROBATCHES
        assert losses == pytest.approx(found, abs=1e-5)


def without_a_microbatch_size():
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    return engine(baselines.deepspeed(), train_batch_size=ROWS).micro_batches


def test_a_batch_size_alone_means_one_micro_batch(four):
    assert four.call(without_a_microbatch_size) == [1] * 4


def order_of_deepspeed(stages, microbatches):
    """By rank, the kinds of its actions."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    baselines.deepspeed()
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    kinds = {ForwardPass: "F", BackwardPass: "B"}
    return [
        [
            kinds[type(one)]
            for step in TrainSchedule(microbatches, stages, rank).steps()
            for one in step
            if type(one) in kinds
        ]
        for rank in range(stages)
    ]


@pytest.mark.parametrize("stages, microbatches", [(4, 8), (4, 2), (3, 5), (1, 3)])
def test_its_schedule_is_ours(four, stages, microbatches):
    expected = four.call(order_of_deepspeed, stages, microbatches)[0]
    schedule = schedules.one_f_one_b(stages, microbatches)
    assert [[action.kind for action in row] for row in schedule] == expected


def before_a_group():
    del os.environ["LOCAL_RANK"]
    try:
        baselines.deepspeed()
    except RuntimeError as error:
        return str(error)


def test_without_a_local_rank_it_says_so(four):
    assert "LOCAL_RANK" in four.call(before_a_group)[0]
