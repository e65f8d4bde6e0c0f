"""V-shaped schedules on real ranks: to the bit, the turn without a message, pairs that overlap."""

import threading
import time
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_loop import differences, squared_error
from torch import nn

from naranhi import measure, models, pipeline, schedules
from naranhi.autograd import Recompute, splittable
from naranhi.pipeline import in_threads
from naranhi.schedules import Schedule

V = {"zero_bubble_v": schedules.zero_bubble_v, "dualpipe_v": schedules.dualpipe_v}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name, overlap", [("zero_bubble_v", None), ("dualpipe_v", None), ("dualpipe_v", in_threads)]
)
def test_gradients_are_the_plain_loops_to_the_bit(five, ranks, name, overlap):
    schedule = V[name](ranks, 8)
    assert any(len(unit) == 2 for row in schedule.units for unit in row) == (name == "dualpipe_v")
    args = "mlp", None, 2, (8,), splittable, overlap
    assert five.call(differences, ranks, schedule, *args) == [{}] * 5
    if ranks == 2:
        args = "gpt2", (2, 1, 1, 1), 1, (), splittable, overlap
        assert five.call(differences, 2, V[name](2, 4), *args) == [{}] * 5


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_fewer_micro_batches_than_a_v_holds(five, microbatches):
    schedule = schedules.zero_bubble_v(4, microbatches)
    assert five.call(differences, 4, schedule, "mlp", None, 1, (8,), splittable) == [{}] * 5


@pytest.mark.parametrize("ranks, microbatches", [(1, 3), (3, 6)])
@pytest.mark.parametrize("name", V)
def test_other_numbers_of_ranks(five, name, ranks, microbatches):
    schedule = V[name](ranks, microbatches)
    args = "mlp", None, 1, (6,), splittable, in_threads
    assert five.call(differences, ranks, schedule, *args) == [{}] * 5


def test_both_ends_of_the_model_are_on_rank_0(five):
    """A tied embedding needs no message; only the order of its sum differs from the plain loop."""
    for schedule in (schedules.zero_bubble_v(2, 4), schedules.dualpipe_v(2, 4)):
        args = "tied gpt2", (1, 1, 1, 2), 3, (), splittable, in_threads
        for wrong in five.call(differences, 2, schedule, *args):
            assert wrong.keys() <= {(0, 0), (4, 2)}
            assert all(gap <= 1e-6 for gap in wrong.values())


# --- messages ------------------------------------------------------------------------------------


def sent(ranks, schedule):
    """By peer, how many messages this rank sends in a step; how many parameters are tied."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    layers, x = splittable(models.mlp(2 * ranks, 8)), torch.ones(schedule.microbatches, 8)
    layers[-1].down = layers[0].down
    with (
        pipeline.Pipeline(layers, schedule, squared_error, group=group) as pipe,
        mock.patch.object(dist, "isend", wraps=dist.isend) as isend,
    ):
        pipe.step(x, -x, 1)
        peers = [call.args[1] for call in isend.call_args_list]
        return {peer: peers.count(peer) for peer in peers}, len(pipe.tied)


@pytest.mark.parametrize("name", V)
def test_the_turn_sends_nothing(five, name):
    """Each rank sends to its neighbours, an activation and a gradient for each chunk; the last one
    has a single neighbour."""
    found = five.call(sent, 3, V[name](3, 6))
    assert found[:3] == [({1: 12}, 0), ({0: 12, 2: 12}, 0), ({1: 12}, 0)]
    assert sum(sum(peers.values()) for peers, _ in found[:3]) == 4 * 6 * (3 - 1)


# --- pairs ---------------------------------------------------------------------------------------


class Busy(torch.autograd.Function):
    """The identity; while its forward or backward lasts, it is counted as running."""

    @staticmethod
    def forward(ctx, x, running):
        ctx.running = running
        running.last(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.running.last(0.01)
        return gradient.clone(), None


class Running:
    """How many things run at the same time."""

    def __init__(self):
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def __deepcopy__(self, memo):
        return Running()  # a trial runs copies of the layers, which are not counted

    def last(self, seconds):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(seconds)
        with self.lock:
            self.now -= 1


class BusyLinear(nn.Module):
    def __init__(self, running):
        super().__init__()
        self.linear, self.running = nn.Linear(4, 4), running

    def forward(self, x):
        return Busy.apply(self.linear(x), self.running)


def overlapped(overlap, grad):
    """How many actions of this rank ran at the same time; the timeline; whether gradients came."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    torch.manual_seed(0)
    running, recorder, x = Running(), measure.Recorder(), torch.ones(8, 4)
    layers = splittable([BusyLinear(running) for _ in range(4)])
    with (
        pipeline.Pipeline(
            layers, schedules.dualpipe_v(2, 8), squared_error, group=group, overlap=overlap
        ) as pipe,
        torch.set_grad_enabled(grad),
    ):
        loss = pipe.step(x, -x, 1, recorder)
        graded = [param.grad is not None for param in pipe.parameters()]
    return running.most, recorder.gather(group), graded, loss is not None


@pytest.mark.parametrize("overlap, most", [(None, 1), (in_threads, 2)])
def test_a_pair_runs_at_the_same_time(five, overlap, most):
    found = five.call(overlapped, overlap, True)[:2]
    schedule = schedules.dualpipe_v(2, 8)
    for rank, (together, timeline, graded, has_loss) in enumerate(found):
        assert together == most
        assert all(graded)
        assert has_loss == (rank == 0)
        spans = timeline[rank]
        assert tuple(span.action for span in spans) == schedule[rank]
        paired = {
            (one.action, two.action) for one, two in pairwise(spans) if one.start == two.start
        }
        pairs = {unit for unit in schedule.units[rank] if len(unit) == 2}
        assert paired == (pairs if overlap else set())


def test_a_pair_in_threads_has_the_callers_grad_mode(five):
    for rank, (_, _, graded, has_loss) in enumerate(five.call(overlapped, in_threads, False)[:2]):
        assert not any(graded)
        assert has_loss == (rank == 0)


class TwoMasks(nn.Module):
    """Draws two masks, with time between them, and records them by what `x` is."""

    def __init__(self):
        super().__init__()
        self.drawn = {}

    def forward(self, x):
        masks = []
        for _ in range(2):
            masks.append(torch.empty_like(x).bernoulli_(0.5))
            time.sleep(0.02)
        self.drawn.setdefault(x[0, 0].item(), []).append(torch.stack(masks))
        return x * masks[0] * masks[1]


def test_a_recomputation_beside_a_forward_draws_what_it_drew():
    layer = Recompute(TwoMasks())
    for _ in range(3):
        layer.layer.drawn.clear()
        ones, twos, threes = (torch.full((4, 64), float(n), requires_grad=True) for n in (1, 2, 3))
        losses = [layer(ones).sum()]
        losses += in_threads(lambda: [layer(twos).sum()], losses[0].backward)[0]  # noqa: B023
        losses += in_threads(lambda: [layer(threes).sum()], losses[1].backward)[0]  # noqa: B023
        losses[2].backward()
        for first, again in layer.layer.drawn.values():
            assert torch.equal(first, again)


# --- bad input -----------------------------------------------------------------------------------


def refused(rows):
    group, rank = first_ranks(2), dist.get_rank()
    try:
        if rank >= 2:
            pipeline.join_group_creation()
        else:
            pipeline.Pipeline(models.mlp(7, 8), Schedule(rows), squared_error, group=group)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "rows, words",
    [
        (str(schedules.dualpipe_v(2, 4)), "7 layers cannot be divided into 4 chunks of one size"),
        (
            "0F0 3F0 3B0 0B0\n1F0 (2F0;2B0)OVERLAP_F_B 1B0",
            "overlaps 2F0 with 2B0, its own backward",
        ),
        (
            "0F0 3F0 0F1 (3F1;3B0)OVERLAP_F_B 0B0 3B1 0B1\n"
            "1F0 2F0 1F1 (2F1;2B0)OVERLAP_F_B 1B0 2B1 1B1",
            "deadlock: rank 0 waits at (3F1;3B0)OVERLAP_F_B for 2F1 of rank 1, rank 1 waits at "
            "(2F1;2B0)OVERLAP_F_B for 3B0 of rank 0",
        ),
    ],
)
def test_bad_input_is_refused_on_every_rank(five, rows, words):
    for told in five.call(refused, rows):
        assert words in told
