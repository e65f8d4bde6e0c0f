"""Which messages are posted when, and through whose memory they go."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from plain_loop import squared_error
from torch import nn

from naranhi import pipeline, schedules
from naranhi.pipeline import channels

WIDTH = 8


class Watch:
    """What a rank starts: each isend and irecv, with the action that it was doing or had done."""

    def __init__(self):
        self.action, self.seen = "start", []

    def begin(self):
        pass

    def end(self, action):
        self.action = str(action)

    def patched(self, name):
        original = getattr(dist, name)

        def start(*args):
            self.seen.append((self.action, name))
            return original(*args)

        return mock.patch.object(dist, name, start)

    def take(self):
        seen, self.seen, self.action = self.seen, [], "start"
        return seen


def watched(device, changes):
    """On a rank of two: by step, what it starts, and what its messages go through. device: that of
    the stages, or what stands in for it. changes: before which steps the circumstances are new."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return pipeline.join_group_creation()
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    watch, steps = Watch(), []
    with pipeline.Pipeline(layers, schedules.gpipe(2, 4), squared_error, group=group) as pipe:
        pipe._messages.device = torch.device(device)
        with watch.patched("isend"), watch.patched("irecv"):
            for step in range(6):
                x = torch.ones(4 * (1 + (step in changes)), WIDTH)
                pipe.step(x, x, 1, watch)
                steps.append(
                    (watch.take(), {str(end.carrier) for end in pipe._messages.ends.values()})
                )
    return steps


def test_two_receives_are_posted_ahead(five):
    """Of activations while the first arrives, of gradients from the beginning; one more for each
    that is taken."""
    first, last = five.call(watched, "cpu", ())[:2]
    for step, _ in first:
        posted = [action for action, name in step if name == "irecv"]
        assert posted == ["start", "start", "0F3", "0B0"]
    for step, _ in last:
        posted = [action for action, name in step if name == "irecv"]
        assert posted == ["start", "start", "start", "1F0"]


def test_the_first_steps_of_a_kind_go_by_way_of_the_cpu(five):
    """Here "cpu:0" stands in for a GPU, and gloo carries from both."""
    for steps in five.call(watched, "cpu:0", (3, 5))[:2]:
        assert [through for _, through in steps] == [
            {"cpu"},
            {"cpu"},
            {"cpu:0"},
            {"cpu"},
            {"cpu:0"},
            {"cpu"},
        ]


@pytest.mark.parametrize("earlier, through", [(0, "cpu"), (1, "cpu"), (2, "cuda:3"), (9, "cuda:3")])
def test_between_gpus_the_first_steps_do_not_wait_on_them(earlier, through):
    assert channels.carrier(torch.device("cuda", 3), earlier) == torch.device(through)
    assert channels.carrier(torch.device("cpu"), earlier) == torch.device("cpu")


@pytest.mark.parametrize("kind, ahead", [("cpu", 2), ("meta", 1)])
def test_where_no_cpu_carries_one_receive_of_a_channel_waits(monkeypatch, kind, ahead):
    """A tensor without memory stands in for one on a GPU."""
    posted = []
    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "recv", lambda *given: None)
    monkeypatch.setattr(dist, "irecv", lambda *given: posted.append(given) or work)
    receiver = channels.Receiver(None, 0, torch.device(kind))
    receiver.expect([[((2,), torch.float32)]] * 4)
    assert len(posted) == ahead
    receiver.take()
    assert len(posted) == ahead + 1
