"""Work on a second stream: in what order streams are told to wait, and on a GPU, what comes out."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from naranhi.distributed import streams

LONG = 200_000_000  # clock cycles: about a tenth of a second


# --- without a stream ----------------------------------------------------------------------------


def test_without_a_stream_the_function_runs_here_and_now():
    x, ran = torch.arange(4.0), []
    later = streams.start(lambda one, two: ran.append(1) or one + two, x, x)
    assert ran == [1]
    assert later.wait() is later.wait()
    assert torch.equal(later.wait(), 2 * x)


def test_what_the_function_raises_is_raised_at_the_start():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        streams.start(torch.mm, torch.ones(2, 3), torch.ones(2, 3))


# --- the order of what streams are told, on stand-ins --------------------------------------------


class Told:
    """Streams, events and tensors that write down what they are told."""

    def __init__(self, monkeypatch):
        self.log = []
        self.side = self.stream("side")
        self.current = self.stream("current")
        self.event = SimpleNamespace(synchronize=lambda: self.log.append("CPU waits"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)

    def stream(self, name):
        return SimpleNamespace(
            name=name,
            device="cuda:0",
            wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.log.append(f"{name} waits for the event"),
            record_event=lambda: self.log.append(f"event on {name}") or self.event,
        )

    def tensor(self, name, is_cuda=True):
        return SimpleNamespace(
            is_cuda=is_cuda,
            device="cuda:0" if is_cuda else "cpu",
            record_stream=lambda stream: self.log.append(f"{name} used by {stream.name}"),
        )

    @contextmanager
    def entered(self, stream):
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")


@pytest.fixture
def told(monkeypatch):
    return Told(monkeypatch)


def test_from_gpu_to_gpu_each_stream_waits_for_the_other(told):
    x, y = told.tensor("x"), told.tensor("y")
    later = streams.start(lambda _: told.log.append("run") or y, x, stream=told.side)
    assert told.log == [
        "side waits for current",
        "x used by side",
        "enter side",
        "run",
        "event on side",
        "leave side",
    ]
    told.log.clear()
    assert later.wait() is y
    assert told.log == ["current waits for the event", "y used by current"]


def test_a_copy_from_the_host_waits_for_nothing_that_is_queued(told):
    host, y = told.tensor("host", is_cuda=False), told.tensor("y")
    streams.start(lambda _: y, host, stream=told.side).wait()
    assert told.log == [
        "enter side",
        "event on side",
        "leave side",
        "current waits for the event",
        "y used by current",
    ]


def test_for_a_copy_to_the_host_the_cpu_waits(told):
    x, host = told.tensor("x"), told.tensor("host", is_cuda=False)
    streams.start(lambda _: host, x, stream=told.side).wait()
    assert told.log[-1] == "CPU waits"
    assert "x used by side" in told.log


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_side_stream_sees_what_the_current_one_is_still_making():
    side, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    torch.cuda._sleep(LONG)
    x.fill_(1.0)
    assert streams.start(torch.clone, x, stream=side).wait().sum().item() == 1000


@pytest.mark.gpu
def test_the_current_stream_sees_what_the_side_one_has_made():
    def slowly(x):
        torch.cuda._sleep(LONG)
        return x + 1

    x = torch.zeros(1000, device="cuda")
    assert streams.start(slowly, x, stream=torch.cuda.Stream()).wait().sum().item() == 1000


@pytest.mark.gpu
def test_memory_that_the_side_stream_still_reads_is_not_given_away():
    def slowly(x):
        torch.cuda._sleep(LONG)
        return x.clone()

    x = torch.ones(2**20, device="cuda")
    later = streams.start(slowly, x, stream=torch.cuda.Stream())
    place = x.data_ptr()
    del x
    other = torch.full((2**20,), 7.0, device="cuda")
    assert other.data_ptr() != place
    assert later.wait().eq(1.0).all().item()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_there_and_back(pinned, non_blocking):
    side, host = torch.cuda.Stream(), torch.arange(2.0**20)
    host = host.pin_memory() if pinned else host
    there = streams.start(lambda x: x.to("cuda", non_blocking=non_blocking), host, stream=side)
    doubled = 2 * there.wait()
    back = streams.start(lambda x: x.to("cpu", non_blocking=non_blocking), doubled, stream=side)
    assert torch.equal(back.wait(), 2 * host)
