"""Hybrid sharding: sharded over one axis of a mesh, copied over another; against one process."""

import re
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from one_process import (
    MAKE,
    OPTIMIZERS,
    STEPS,
    alone,
    largest_differences,
    same_bits_everywhere,
    share,
)
from sent import messages

from naranhi import costs
from naranhi.data_parallel import global_count
from naranhi.zero import Zero

STAGES = 1, 2, 3
CLIP = 0.05  # below the norms met here


def mesh(near):
    """Of the first four of five ranks: (group, replicas, all four), with `near` ranks in a group;
    None on the fifth."""
    rows = [[*range(start, start + near)] for start in range(0, 4, near)]
    made = [[dist.new_group(ranks) for ranks in axis] for axis in (rows, zip(*rows, strict=True))]
    everyone, rank = dist.new_group(range(4)), dist.get_rank()
    if rank < 4:
        return made[0][rank // near], made[1][rank % near], everyone
    return None


def backward(model, loss, work, step, rank, group):
    inputs, targets, valid = share(work, step, rank)
    (loss(model(inputs), targets) / global_count(valid, group)).backward()


def training(near, work, optimizer, clip):
    """On rank 0, by stage: how far parameters are from those of one process after `STEPS` steps."""
    axes, rank = mesh(near), dist.get_rank()
    if not axes:
        return None
    group, replicas, everyone = axes
    expected, apart = alone(4, work, optimizer, clip) if rank == 0 else None, {}
    for stage in STAGES:
        torch.manual_seed(rank)  # another start on each rank, until they are made equal
        model, loss = MAKE[work]()
        zero = Zero(model, stage, group=group, replicas=replicas)
        stepper = OPTIMIZERS[optimizer](zero.param_groups)
        for step in range(STEPS):
            backward(model, loss, work, step, rank, everyone)
            if clip:
                assert zero.clip_grad_norm_(clip) > clip
            zero.step(stepper)
        with zero.gathered():
            assert same_bits_everywhere(model, everyone), stage
            if rank == 0:
                apart[stage] = largest_differences(model, expected)
    return apart


@pytest.mark.parametrize("work", MAKE)
@pytest.mark.parametrize(
    "near, optimizer, clip",
    [(2, "momentum", None), (2, "adamw 3e-05", None), (2, "momentum", CLIP), (1, "momentum", None)],
)
def test_training_equals_one_process(five, near, optimizer, work, clip):
    apart = five.call(training, near, work, optimizer, clip)[0]
    assert [*apart] == [*STAGES]
    for real, idle in apart.values():
        assert real <= 1e-6
        assert idle <= (2 * STEPS * 3e-5 if "adamw" in optimizer else 1e-6)


@contextmanager
def counted():
    """{group: bytes handed to the backend for sending} meanwhile, filled at the end."""
    sent = Counter()
    with messages() as handed:
        yield sent
    for one in handed:
        sent[one.group] += one.nbytes


def traffic():
    """By (stage, micro-batches): bytes over group and replicas, what is predicted; the events."""
    axes = mesh(2)
    if not axes:
        return None
    group, replicas, _ = axes
    found = {}
    for stage, microbatches in [(1, 1), (2, 1), (2, 3), (3, 1), (3, 3)]:
        model, loss = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), torch.sum
        events = []
        zero = Zero(
            model,
            stage,
            group=group,
            replicas=replicas,
            on_event=lambda event, unit, events=events: events.append(event),
        )
        stepper = torch.optim.SGD(zero.param_groups, lr=0.1)
        x = torch.randn(8, 64)
        for _ in range(2):  # the order of units is known from the second step on
            events.clear()
            with counted() as sent:
                with zero.no_sync():
                    for _ in range(microbatches - 1):
                        loss(model(x)).backward()
                loss(model(x)).backward()
                zero.step(stepper)
        parameters = sum(flat.size * 2 for flat in zero.flats)
        found[stage, microbatches] = (
            sent[group],
            sent[replicas],
            costs.hybrid_bytes_sent(parameters, 2, 2, stage, "fp32"),
            Counter(events),
        )
    return found


def test_only_a_shard_of_the_gradients_leaves_the_group_and_once_a_step(five):
    for found in five.call(traffic)[:4]:
        for (stage, microbatches), (near, far, (near_once, far_once), events) in found.items():
            few = 64  # bytes of flags: who has which gradient, who has a forward
            assert far_once <= far <= far_once + few, (stage, microbatches)
            reductions = microbatches if stage > 1 else 1
            gathers = 2 * microbatches if stage == 3 else 1
            one = near_once / (3 if stage == 3 else 2)
            assert (reductions + gathers) * one <= near <= (reductions + gathers) * one + few
            assert events["sum"] == events["summed"] == 4
            assert events["reduced"] == 4 * reductions


def refusals():
    """What each kind of mistake raises on this rank."""
    axes, rank = mesh(2), dist.get_rank()
    crossed = [dist.new_group(ranks) for ranks in ((0, 3), (1, 2))]
    if not axes:
        return None
    group, replicas, everyone = axes
    across, messages = crossed[rank in (1, 2)], {}

    def attempt(name, function):
        try:
            function()
        except (ValueError, RuntimeError, FloatingPointError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
        dist.barrier(everyone)

    attempt("twice", lambda: Zero(torch.nn.Linear(4, 4), 3, group=group, replicas=everyone))
    attempt("other shard", lambda: Zero(torch.nn.Linear(4, 4), 3, group=group, replicas=across))
    attempt(
        "other shape",
        lambda: Zero(torch.nn.Linear(4, 4 + (rank == 3)), 3, group=group, replicas=replicas),
    )
    attempt("other stage", lambda: Zero(torch.nn.Linear(4, 4), 3 - (rank > 1), **both(axes)))

    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    zero = Zero(model, 2, **both(axes))
    layers = model if rank != 3 else model[:1]  # rank 3 does not use the second layer
    attempt("gradient", lambda: sum(layer(torch.ones(2, 4)).sum() for layer in layers).backward())

    model = torch.nn.Linear(4, 4)
    zero = Zero(model, 3, check_finite=True, **both(axes))
    factor = float("nan") if rank == 2 else 1.0
    attempt("not finite", lambda: (model(torch.ones(2, 4)).sum() * factor).backward())

    model = torch.nn.Linear(4, 4)
    zero = Zero(model, 3, **both(axes))
    attempt(
        "no forward",
        (lambda: model(torch.ones(2, 4)).sum().backward()) if rank != 2 else zero.synchronize,
    )
    return messages


def both(axes):
    return {"group": axes[0], "replicas": axes[1]}


def test_a_mistake_in_one_copy_is_an_error_on_every_rank(five):
    expected = {
        "twice": r"ValueError: group and replicas have to be two axes of a mesh: .* twice",
        "other shard": "ValueError: on rank 0, 3: replicas have to hold the same shard, one in "
        "each group, but rank 0 has shard 0, rank 3 has shard 1",
        "other shape": r"ValueError: parameter weight has shape .* on rank 0 and \(5, 4\) .*3",
        "other stage": "ValueError: stage: 3 on rank 0, 2 on rank 2",
        "gradient": "RuntimeError: parameter 1.weight has a gradient on rank 0, 1, 2, but none .*3",
        "not finite": "FloatingPointError: the gradient of parameter .* is not finite",
        "no forward": "RuntimeError: rank 2 has no forward in this step",
    }
    for told in five.call(refusals)[:4]:
        assert [*told] == [*expected]
        for name, pattern in expected.items():
            assert re.match(pattern, told[name]), told[name]
