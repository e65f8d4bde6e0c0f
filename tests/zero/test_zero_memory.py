"""Bytes that a rank holds and sends under ZeRO, against the formulas."""

import gc
from itertools import pairwise, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from torch import nn

from naranhi import costs, models
from naranhi.collectives import chunks
from naranhi.zero import Zero

STAGES = 1, 2, 3
BLOCKS = 4
OPTIMIZERS = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}


def alive():
    """Bytes of all tensors that Python knows of: parameters, gradients, what is on its way; but for
    those that were there before `gc.freeze()`, which also makes this quick."""
    seen = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, nn.Parameter):
            memory = one.untyped_storage()
            seen[memory.data_ptr()] = memory.nbytes()
    return sum(seen.values())


def watched(ranks, stage, precision, kind):
    """On rank 0: sizes, and what was alive and sent in the third step of a few wide layers on one
    row, next to which activations are nothing."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    gc.collect()
    gc.freeze()
    model, row = nn.Sequential(*models.mlp(BLOCKS, 64, 512)), torch.ones(1, 64)
    samples, sent, told = [], [], []
    unit = sum(one.numel() for one in model[0].parameters())

    def sample(*event):
        samples.append(alive())
        told.append(event)

    for name, one in model.named_parameters():  # before the hook of Zero's: the gradient is new
        one.register_post_accumulate_grad_hook(lambda _, block=name[0]: sample("gradient", block))
    zero = Zero(
        model,
        stage,
        group=group,
        precision=precision,
        on_event=sample,
    )
    optimizer = OPTIMIZERS[kind](zero.param_groups, lr=1e-3)
    casts = []
    optimizer.register_step_pre_hook(lambda *_: casts.append(zero.memory(optimizer)["casts"]))
    start = chunks.start

    def sampled(group, sends=(), receives=(), tag=0):
        samples.append(alive())
        sends = list(sends)
        sent.extend((tensor.dtype, tensor.nbytes) for tensor, _ in sends)
        return start(group, sends, receives, tag)

    with mock.patch.object(chunks, "start", sampled):
        for _ in range(3):
            del samples[:], sent[:], told[:]
            model(row).square().sum().backward()
            gc.collect()
            held, between = zero.memory(optimizer), alive()
            peak = max(samples)
            zero.step(optimizer)
            events = list(told)
    gc.unfreeze()
    zero.close()
    return {
        "unit": unit,
        "held": held,
        "between": between,
        "peak": peak,
        "told": events,
        "casts": casts[-1],
        "sent": sum(size for dtype, size in sent if dtype.is_floating_point),
        "flags": sum(size for dtype, size in sent if not dtype.is_floating_point),
    }


@pytest.mark.parametrize("precision, kind", [("fp32", "adam"), ("bf16", "adam"), ("fp32", "sgd")])
@pytest.mark.parametrize("ranks, stage", list(product([2, 4], STAGES)))
def test_bytes_are_those_of_the_formulas(five, ranks, stage, precision, kind):
    found = five.call(watched, ranks, stage, precision, kind)[0]
    parameters, unit, held = BLOCKS * found["unit"], found["unit"], found["held"]
    formula = costs.zero_bytes(parameters, ranks, stage, precision, kind)
    state = sum(held[key] for key in ("parameters", "gradients", "master", "optimizer"))
    assert state == pytest.approx(formula, rel=0.02)
    assert held["padding"] < 0.01 * formula and held["casts"] == 0
    # Held is what there is: nothing that Python knows of is left out.
    assert found["between"] == pytest.approx(state + held["padding"], rel=0.02)
    value = 2 if precision == "bf16" else 4
    assert found["casts"] == (
        pytest.approx(4 * parameters / ranks, rel=0.01) if precision == "bf16" else 0
    )
    # Two gathered units of parameters, and two of gradients (and what one row of data takes).
    assert found["peak"] <= found["between"] + 4 * unit * value + 2**15
    assert found["sent"] == costs.zero_bytes_sent(parameters, ranks, stage, precision)
    assert found["flags"] < 2**10


@pytest.mark.parametrize("stage", [2, 3])
def test_flat_gradients_are_freed_when_the_next_unit_has_its_first_gradient(five, stage):
    """On two ranks, whose reduction is one message: no later, or two units' were held at once."""
    told = five.call(watched, 2, stage, "fp32", "adam")[0]["told"]
    for one, other in pairwise(reversed([str(i) for i in range(BLOCKS)])):
        gradients = [i for i, event in enumerate(told) if event == ("gradient", other)]
        assert gradients[0] < told.index(("reduced", one)) < gradients[1]


def test_the_order_of_events_at_stage_3(five):
    """Each unit gathered before it computes, one ahead; its sum ends while the next computes."""
    told = five.call(watched, 2, 3, "fp32", "adam")[0]["told"]
    computed = [what for event, what in told if event == "compute" and what != "root"]
    names = [str(i) for i in range(BLOCKS)]
    assert computed == names + names[::-1]
    here, most = set(), 0
    for event, what in told:
        if event == "gather":
            here.add(what)
        elif event == "free":
            here.remove(what)
        elif event == "compute" and what != "root":
            assert what in here
        most = max(most, len(here))
    assert most == 2 and not here
    for one, other in pairwise(names):  # is on its way while the one before computes
        assert (
            told.index(("gather", other))
            < told.index(("compute", one))
            < told.index(("free", one))
            < told.index(("gathered", other))
        )
    backward = told[told.index(("reduce", names[-1])) :]
    for one, other in pairwise(names[::-1]):
        assert (
            backward.index(("reduce", one))
            < backward.index(("compute", other))
            < (backward.index(("reduced", one)))
            < backward.index(("reduce", other))
        )
