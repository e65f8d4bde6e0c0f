"""Measuring: in turn, the slowest rank's time, without the checks and back."""

import time

import pytest
import torch
import torch.distributed as dist

from naranhi import measure

LATE = 0.1  # seconds by which one rank is late, far above a barrier's time


def timed():
    rank, calls = dist.get_rank(), []

    def late():
        calls.append("late")
        time.sleep(LATE if rank == 3 else 0.0)

    def prompt():
        calls.append("prompt")

    return measure.interleaved({"late": late, "prompt": prompt}, repeats=4, warmup=2), calls


def test_interleaved_takes_turns_and_the_slowest_ranks_time(five):
    answers = five.call(timed)
    for times, calls in answers:
        assert calls == ["late", "prompt"] * 6
        assert times == answers[0][0]
        assert [len(series) for series in times.values()] == [4, 4]
        assert min(times["late"]) >= LATE
        # Waiting for the late rank is no part of the next contender's time.
        assert min(times["prompt"]) < LATE / 2


def refused():
    with pytest.raises(ValueError):
        measure.interleaved({})
    with pytest.raises(ValueError):
        measure.interleaved({"nothing": int}, repeats=0)
    with pytest.raises(ValueError, match=r"and warmup at least 0, not 1, .* and -2"):
        measure.interleaved({"nothing": int}, warmup=-2)
    return True


def test_nothing_to_measure_is_refused(five):
    assert five.call(refused) == [True] * 5


def without_checks():
    """What torch makes of a group in a world that checks everything, and of an unchecked one."""
    rank, tensor, seen = dist.get_rank(), torch.ones(2), {}
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with measure.unchecked_group([0, 2, 4]) as group:
            seen["level inside"] = dist.get_debug_level() == dist.DebugLevel.DETAIL
            if rank in (0, 2, 4):
                dist.all_reduce(tensor, group=group)
                seen["size"] = dist.get_world_size(group)
                seen["unchecked"] = backend_of(group)
        checked = dist.new_group()
        seen["checked"] = backend_of(checked)
        dist.destroy_process_group(checked)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    seen["sum"] = tensor[0].item()
    return seen


def backend_of(group):
    return type(group._get_backend(torch.device("cpu"))).__name__


def test_unchecked_group_has_no_checks_and_new_groups_have_them_again(five):
    for rank, seen in enumerate(five.call(without_checks)):
        assert seen["level inside"]
        assert "Wrapper" in seen["checked"]
        if rank in (0, 2, 4):
            assert seen["size"] == 3 and seen["sum"] == 3.0
            assert "Wrapper" not in seen["unchecked"]


def counted():
    tensor = torch.ones(50_000)
    dist.broadcast(tensor, 0)
    dist.barrier()
    before = measure.wire_bytes()
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)
    dist.barrier()
    return measure.wire_bytes() - before


def test_wire_bytes_counts_what_is_sent(five):
    sender, *others = five.call(counted)
    assert 200_000 <= sender < 204_000
    assert all(other < 4_000 for other in others)
