"""Schedules exchanged with torch.distributed.pipelining: its runtime runs ours, and we read its."""

import csv
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as torchs
from gloo_ranks import first_ranks
from torch.distributed.pipelining import PipelineStage

from naranhi import schedules

WIDTH, ROWS = 16, 3  # of a layer; of a micro-batch


def layer(stage):
    torch.manual_seed(stage)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def squared_error(output, target):
    return (output - target).square().mean()


def batch(microbatches):
    generator = torch.Generator().manual_seed(99)
    return torch.randn(2, ROWS * microbatches, WIDTH, generator=generator)


def plain_loop(stages, microbatches):
    """Losses, and gradients by stage, of one process that takes a micro-batch after the other."""
    model = torch.nn.Sequential(*map(layer, range(stages)))
    losses = []
    for x, y in zip(*(part.chunk(microbatches) for part in batch(microbatches)), strict=True):
        losses.append(squared_error(model(x), y))
        losses[-1].backward()
    return losses, [[parameter.grad for parameter in part.parameters()] for part in model]


def run_on_torch(ranks, path, microbatches, stages, mine):
    """(losses, gradients by stage) that differ in any bit from the plain loop's; counts of both."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    parts = [
        PipelineStage(layer(stage), stage, stages, torch.device("cpu"), group=group)
        for stage in mine[rank]
    ]
    runtime = torchs._PipelineScheduleRuntime(
        parts, microbatches, loss_fn=squared_error, scale_grads=False
    )
    runtime._load_csv(path)
    x, y = batch(microbatches)
    losses = []
    first = [x] if 0 in mine[rank] else []
    last = {"target": y, "losses": losses} if stages - 1 in mine[rank] else {}
    runtime.step(*first, **last)
    expected_losses, expected = plain_loop(stages, microbatches)
    equal = [torch.equal(one, two) for one, two in zip(losses, expected_losses, strict=False)]
    for part in parts:
        for parameter, gradient in zip(
            part.submod.parameters(), expected[part.stage_index], strict=True
        ):
            equal.append(parameter.grad is not None and torch.equal(parameter.grad, gradient))
    return len(losses), equal


OURS = {
    "gpipe on 2": schedules.gpipe(2, 4),
    "gpipe on 4": schedules.gpipe(4, 6),
    "gpipe on 4, fewer micro-batches": schedules.gpipe(4, 1),
    "inter-layer on 3": schedules.inter_layer(3, 3),
    "1f1b on 2": schedules.one_f_one_b(2, 4),
    "1f1b on 4": schedules.one_f_one_b(4, 6),
    "1f1b on 4, fewer micro-batches": schedules.one_f_one_b(4, 2),
    "interleaved by 2 on 2": schedules.interleaved(2, 4, 2),
    "interleaved by 4 on 2": schedules.interleaved(2, 4, 4),
    "interleaved by 2 on 4": schedules.interleaved(4, 8, 2),
    "zero-bubble H1 on 2": schedules.zero_bubble_h1(2, 4),
    "zero-bubble H1 on 4": schedules.zero_bubble_h1(4, 6),
    "zero-bubble H1 on 4, one micro-batch": schedules.zero_bubble_h1(4, 1),
    "zero-bubble H2 on 2": schedules.zero_bubble_h2(2, 4),
    "zero-bubble H2 on 4": schedules.zero_bubble_h2(4, 7),
}


# Before, torch opened a connection from a rank to itself at the turn, which gloo does not have.
a_v = pytest.mark.skipif(torch.__version__ < "2.13", reason="a V needs torch 2.13 on gloo")
V = {
    "zero-bubble V on 2": schedules.zero_bubble_v(2, 4),
    "zero-bubble V on 4": schedules.zero_bubble_v(4, 8),
    "DualPipeV on 2": schedules.dualpipe_v(2, 4),
    "DualPipeV on 4": schedules.dualpipe_v(4, 9),
}


@pytest.mark.parametrize(
    "schedule",
    [*OURS.values(), *(pytest.param(one, marks=a_v) for one in V.values())],
    ids=[*OURS, *V],
)
def test_torch_runs_ours_to_the_bit(five, tmp_path, schedule):
    schedules.check(schedule)
    path, virtual = tmp_path / "ours.csv", schedule.virtual_stages
    schedules.write_csv(schedule, path)
    mine = [sorted({action.stage for action in row}) for row in schedule]
    answers = five.call(
        run_on_torch, schedule.stages, str(path), schedule.microbatches, virtual, mine
    )
    for rank, answer in enumerate(answers[: schedule.stages]):
        losses, equal = answer
        assert losses == (schedule.microbatches if virtual - 1 in mine[rank] else 0)
        assert equal == [True] * (losses + 2 * len(mine[rank]))


# --- reading torch's -----------------------------------------------------------------------------

# By name: the virtual stages of rank r of p.
THEIRS = {
    "ScheduleLoopedBFS": lambda r, p: [r, r + p],
    "ScheduleInterleaved1F1B": lambda r, p: [r, r + p],
    "ScheduleInterleavedZeroBubble": lambda r, p: [r, r + p],
    "ScheduleZBVZeroBubble": lambda r, p: [r, 2 * p - 1 - r],
    "ScheduleDualPipeV": lambda r, p: [r, 2 * p - 1 - r],
}


# Those that are ours, action by action and pair by pair.
SAME = {
    "ScheduleInterleaved1F1B": lambda p, m: schedules.interleaved(p, m, 2),
    "ScheduleZBVZeroBubble": schedules.zero_bubble_v,
    "ScheduleDualPipeV": schedules.dualpipe_v,
}


def write_theirs(ranks, name, microbatches, folder):
    """Torch's schedule of that name, written by torch in both of its forms."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return
    parts = [
        PipelineStage(layer(stage), stage, 2 * ranks, torch.device("cpu"), group=group)
        for stage in THEIRS[name](rank, ranks)
    ]
    theirs = getattr(torchs, name)(parts, microbatches, loss_fn=squared_error)
    if rank == 0:
        for form in ("compute_only", "compute_comms"):
            theirs._dump_csv(f"{folder}/{form}.csv", format=form)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", THEIRS)
def test_we_read_what_torch_wrote(five, tmp_path, name, ranks):
    microbatches = 2 * ranks
    five.call(write_theirs, ranks, name, microbatches, str(tmp_path))
    schedule = schedules.read_csv(tmp_path / "compute_only.csv")
    assert schedule == schedules.read_csv(tmp_path / "compute_comms.csv")
    assert schedule.placement == tuple(
        next(rank for rank in range(ranks) if stage in THEIRS[name](rank, ranks))
        for stage in range(2 * ranks)
    )
    assert schedule.microbatches == microbatches
    timeline = schedules.simulate(schedule, Fraction(1), Fraction(2), latency=0)
    assert timeline.bubble_rate < Fraction(ranks - 1, microbatches + ranks - 1)  # GPipe's
    idle = timeline.cost - timeline.busy[0]
    if name in ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B"):  # one chunk's F + B is 3
        assert idle == (ranks - 1) * 3
    elif name == "ScheduleZBVZeroBubble":  # its claim, where F, I and W take equally long
        assert idle == 0
    else:
        assert idle > 0
    if name in SAME:
        assert schedule == SAME[name](ranks, microbatches)
    if name == "ScheduleLoopedBFS":
        assert timeline.peak_activations == (microbatches,) * ranks


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 1), (2, 7), (3, 4), (4, 13)])
def test_torchs_v_is_ours(five, tmp_path, ranks, microbatches):
    """Also with fewer micro-batches than a V holds, of which DualPipeV has none."""
    for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        if name == "ScheduleDualPipeV" and microbatches < 2 * ranks:
            continue
        five.call(write_theirs, ranks, name, microbatches, str(tmp_path))
        theirs = schedules.read_csv(tmp_path / "compute_only.csv")
        assert theirs == SAME[name](ranks, microbatches)


def run_theirs(ranks, name, microbatches):
    """Whether each loss and gradient of torch's own schedule is the plain loop's to the bit."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    mine = THEIRS[name](rank, ranks)
    parts = [
        PipelineStage(layer(stage), stage, 2 * ranks, torch.device("cpu"), group=group)
        for stage in mine
    ]
    theirs = getattr(torchs, name)(parts, microbatches, loss_fn=squared_error, scale_grads=False)
    x, y = batch(microbatches)
    losses = []
    theirs.step(*[x] * (0 in mine), **({"target": y, "losses": losses} if rank == 0 else {}))
    expected_losses, expected = plain_loop(2 * ranks, microbatches)
    equal = [torch.equal(one, two) for one, two in zip(losses, expected_losses, strict=False)]
    for part in parts:
        gradients = (parameter.grad for parameter in part.submod.parameters())
        equal += map(torch.equal, gradients, expected[part.stage_index])
    return equal


@a_v
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_torchs_own_v_has_the_loss_on_rank_0(five, name, ranks):
    found = five.call(run_theirs, ranks, name, 2 * ranks)
    assert found[:ranks] == [[True] * (2 * ranks * (rank == 0) + 4) for rank in range(ranks)]


def write_their_1f1b(ranks, microbatches, path):
    """Torch's 1F1B, which has no export of its own, in the form of those that have one."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return
    part = PipelineStage(layer(rank), rank, ranks, torch.device("cpu"), group=group)
    theirs = torchs.Schedule1F1B(part, microbatches, loss_fn=squared_error)
    if rank == 0:
        rows = theirs._get_pipeline_order()
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(rows[one] for one in range(ranks))


@pytest.mark.parametrize("ranks, microbatches", [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_torchs_1f1b_is_ours(five, tmp_path, ranks, microbatches):
    five.call(write_their_1f1b, ranks, microbatches, str(tmp_path / "theirs.csv"))
    theirs = schedules.read_csv(tmp_path / "theirs.csv")
    ours = schedules.one_f_one_b(ranks, microbatches)
    # Torch 2.13 counts the forwards of the last rank from 1 in what it tells of its order (not in
    # what it does), so of that rank only the kinds are compared.
    assert theirs.rows[:-1] == ours.rows[:-1]
    assert [action.kind for action in theirs[-1]] == [action.kind for action in ours[-1]]


def test_a_schedule_of_torchs_runs_on_torch_when_written_again(five, tmp_path):
    five.call(write_theirs, 2, "ScheduleInterleavedZeroBubble", 4, str(tmp_path))
    schedule = schedules.read_csv(tmp_path / "compute_comms.csv")
    schedules.write_csv(schedule, tmp_path / "again.csv")
    mine = [[0, 2], [1, 3]]
    answers = five.call(run_on_torch, 2, str(tmp_path / "again.csv"), 4, 4, mine)
    assert answers[:2] == [(0, [True] * 4), (4, [True] * 8)]


def test_lines_are_read_as_a_file_is(tmp_path):
    schedule = schedules.zero_bubble_v(2, 4)
    schedules.write_csv(schedule, tmp_path / "own.csv")
    text = (tmp_path / "own.csv").read_text()
    assert schedules.read_csv(text.splitlines()) == schedule
    with open(tmp_path / "own.csv", newline="") as file:
        assert schedules.read_csv(file) == schedule
    with pytest.raises(schedules.ScheduleError, match=r"^rank 0: '0X0' is not an action"):
        schedules.read_csv(["0F0,0X0"])


def test_a_file_that_is_no_csv_is_named(tmp_path):
    file = tmp_path / "own.csv"
    for content in b"\x89PNG\r\n", "0F0,0B0\n".encode("utf-16"), b"x" * 200_000:
        file.write_bytes(content)
        with pytest.raises(schedules.ScheduleError, match=r"own\.csv is not a CSV of a schedule"):
            schedules.read_csv(file)
    file.write_bytes("0F0,0B0\n".encode("utf-8-sig"))  # as spreadsheets write it
    assert schedules.read_csv(file) == schedules.Schedule([["0F0", "0B0"]])
