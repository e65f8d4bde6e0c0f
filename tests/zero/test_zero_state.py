"""The state of ZeRO: resumed on other ranks; what is not whole, or foreign, is refused."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import first_ranks
from one_process import MAKE, OPTIMIZERS, share
from torch import nn

from naranhi import models
from naranhi.zero import StateError, Zero, checkpoint_files

SHARES = 4  # of each step, whatever the number of ranks


def run(ranks, work, stage, precision, steps, folder, load):
    """Steps of training from the start, or from a state; saves at the end. Losses, and all numbers
    of the state before the first step and after the last."""
    group, rank = first_ranks(ranks), dist.get_rank()
    if rank >= ranks:
        return None
    torch.manual_seed(rank)
    model, loss = MAKE[work]()
    zero = Zero(
        model,
        stage,
        group=group,
        precision=precision,
        param_groups=[
            {"params": [one for one in model.parameters() if one.dim() > 1]},
            {"params": [one for one in model.parameters() if one.dim() == 1], "weight_decay": 0.0},
        ],
    )
    optimizer = OPTIMIZERS["adamw 0.001"](zero.param_groups)
    if load:
        zero.load(folder, optimizer)
    first, losses = numbers(zero, optimizer), []
    for step in range(*steps):
        shares = [share(work, step, place) for place in range(SHARES)]
        count = sum(valid for _, _, valid in shares)
        total = torch.zeros(())
        own = shares[rank * SHARES // ranks : (rank + 1) * SHARES // ranks]
        with zero.no_sync():
            for inputs, targets, _ in own[:-1]:
                one = loss(model(inputs), targets)
                total += one.detach()
                (one / count).backward()
        one = loss(model(own[-1][0]), own[-1][1])
        (one / count).backward()
        total += one.detach()
        dist.all_reduce(total, group=group)
        losses.append(total.item() / count)
        zero.clip_grad_norm_(1.0)
        zero.step(optimizer)
    zero.save(folder, optimizer)
    return losses, first, numbers(zero, optimizer)


def numbers(zero, optimizer):
    """Masters and the optimizer's state, put together from all ranks, and the steps it counts."""
    mine = []
    for unit in zero.units:
        for flat in unit.flats:
            for piece in flat.pieces.values():
                state = optimizer.state.get(piece, {})
                mine.append([piece.tolist(), *(one.tolist() for one in state.values())])
    told = [None] * dist.get_world_size(zero.group)
    dist.all_gather_object(told, mine, group=zero.group)
    together = []
    for parts in zip(*told, strict=True):
        for values in zip(*parts, strict=True):
            together.append([*chain(*values)] if isinstance(values[0], list) else values[0])
    return together


@pytest.mark.parametrize(
    "work, stage, precision",
    [("mlp", 1, "fp32"), ("tied gpt2", 2, "fp32"), ("tied gpt2", 3, "fp32"), ("mlp", 3, "bf16")],
)
def test_training_goes_on_where_it_was_stopped(five, tmp_path, work, stage, precision):
    """On 4 ranks, then 2, then 1, then 4: each finds the very numbers that the one before left."""
    whole, *_ = five.call(run, 4, work, stage, precision, (0, 8), str(tmp_path / "whole"), False)[0]
    losses, left = [], None
    for i, ranks in enumerate([4, 2, 1, 4]):
        some, found, after = five.call(
            run, ranks, work, stage, precision, (2 * i, 2 * i + 2), str(tmp_path / "state"), i > 0
        )[0]
        assert left is None or found == left
        losses, left = losses + some, after
        assert len(list((tmp_path / "state").glob("rank-*"))) == ranks
    bound = {"rel": 1e-6} if precision == "fp32" else {"rel": 2e-2}
    assert losses == pytest.approx(whole, **bound)
    assert losses[-1] != losses[0]


def refused(folder, width, optimizer, units):
    """What load says, whether nothing has changed, on three ranks."""
    group, rank = first_ranks(3), dist.get_rank()
    if rank >= 3:
        return None
    torch.manual_seed(1)
    model = nn.Sequential(*models.mlp(2, width, 6))
    zero = Zero(model, 3, units=[] if units == "none" else None, group=group)
    stepper = getattr(torch.optim, optimizer)(zero.param_groups, lr=0.25)
    before = numbers(zero, stepper)
    try:
        zero.load(folder, stepper)
    except StateError as error:
        assert numbers(zero, stepper) == before and stepper.param_groups[0]["lr"] == 0.25
        return str(error)
    return None


def written(folder):
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    model = nn.Sequential(*models.mlp(2, 4, 6))
    zero = Zero(model, 3, group=group)
    optimizer = torch.optim.AdamW(zero.param_groups)
    model(torch.ones(1, 4)).sum().backward()
    zero.step(optimizer)
    zero.save(folder, optimizer)


def interrupted(folder):
    """A second save that fails on one rank, or that has more than numbers: what `save` says."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = nn.Sequential(*models.mlp(2, 4, 6))
    zero = Zero(model, 3, group=group)
    optimizer = torch.optim.AdamW(zero.param_groups)
    model(torch.ones(1, 4)).sum().backward()
    zero.step(optimizer)
    original, told = checkpoint_files.write, []

    def full(path, data):
        original(path.with_name(path.name + ".part"), data[:10])
        raise OSError(28, "No space left on device")

    def attempt():
        with pytest.raises(StateError) as error:
            zero.save(folder, optimizer)
        told.append(str(error.value))

    for fails in 1, 0:  # its shards; the manifest, when all shards are there
        checkpoint_files.write = lambda path, data, fails=fails: (
            full if rank == fails and (fails or path.suffix == ".json") else original
        )(path, data)
        try:
            attempt()
        finally:
            checkpoint_files.write = original
    optimizer.param_groups[0]["note"] = Path("x")
    attempt()
    del optimizer.param_groups[0]["note"]
    if rank == 1:
        optimizer.param_groups[0]["note"] = lambda: None  # which cannot be pickled
    attempt()
    optimizer.param_groups[0].pop("note", None)
    next(iter(optimizer.state.values()))["shape"] = torch.ones(2, 3)
    attempt()
    return told


def test_a_save_that_is_interrupted_leaves_the_one_before(five, tmp_path):
    state = tmp_path / "state"
    five.call(written, str(state))
    manifest = (state / "manifest.json").read_text()
    one, other = five.call(interrupted, str(state))[:2]
    assert one == other and one[:2] == [
        f"on rank {rank}: [Errno 28] No space left on device" for rank in (1, 0)
    ]
    assert "pathlib" in one[2] and "which is not read from files" in one[2]
    assert one[3].startswith("on rank 1: ") and "pickle" in one[3]
    assert "AdamW keeps shape of shape (2, 3) for" in one[4]
    assert (state / "manifest.json").read_text() == manifest
    assert five.call(refused, str(state), 4, "AdamW", "children")[:3] == [None] * 3
    assert list(state.glob("*.part"))
    five.call(written, str(state))  # and the next one clears up
    assert {one.suffix for one in state.glob("rank-*")} == {".pt"}


def with_frozen(folder, stage, precision):
    """Save a model with frozen weights and load it into another: both give the same outputs."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return
    outputs = []
    for seed in 0, 1:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        zero = Zero(model, stage, group=group, precision=precision)
        optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
        (zero.load if seed else zero.save)(folder, optimizer)
        with torch.no_grad():
            outputs.append(model(torch.ones(1, 3)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_frozen_is_loaded_too(five, tmp_path, stage, precision):
    five.call(with_frozen, str(tmp_path / "state"), stage, precision)


def refused_save(folder):
    """What `save` says on each rank, or None."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    model = nn.Linear(3, 3)
    zero = Zero(model, 2, units=[], group=group)
    optimizer = torch.optim.SGD(zero.param_groups, lr=0.1)
    try:
        zero.save(folder, optimizer)
    except StateError as error:
        return str(error)
    return None


def test_save_deletes_its_own_files_only(five, tmp_path):
    """Neither what looks like them, nor a folder; a manifest of something else stops the save."""
    folder = tmp_path / "state"
    foreign = [
        "rank-0.log",
        "rank-3-notes.pt",
        "rank-1-0123456789abcdef.pt.bak",
        "rank-0/model.pt",
        "rank-2-0123456789abcdef.pt/within",
    ]
    own = ["rank-4-0123456789abcdef.pt", "rank-4-fedcba9876543210.pt.part"]  # of an earlier save
    for name in [*foreign, *own]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    assert five.call(refused_save, str(folder))[:2] == [None, None]
    assert all((folder / name).read_text() == "precious" for name in foreign)
    assert not any((folder / name).exists() for name in own)
    assert len(list(folder.glob("rank-?-????????????????.pt"))) == 3  # a folder is one of them

    other = tmp_path / "other"
    other.mkdir()
    for text in '{"name": "a web page"}', "[]", "not json":
        (other / "manifest.json").write_text(text)
        told = five.call(refused_save, str(other))[:2]
        assert (
            told
            == [
                f"{other / 'manifest.json'} was not written by save: pass another folder, "
                "or move the file away"
            ]
            * 2
        )
        assert (other / "manifest.json").read_text() == text
        assert [path.name for path in other.iterdir()] == ["manifest.json"]


def test_a_state_that_cannot_be_right_is_refused(five, tmp_path):
    state = tmp_path / "state"
    five.call(written, str(state))

    def told(width=4, optimizer="AdamW", units="children", folder=state):
        answers = five.call(refused, str(folder), width, optimizer, units)[:3]
        assert answers[0] and len(set(answers)) == 1, "the same on every rank"
        return answers[0]

    assert told(width=5) == (
        "parameter 0.up.weight has shape [6, 4] in the state and [6, 5] in the model"
    )
    assert told(units="none") == (
        "parameter 0.up.weight has unit 0 in the state and root in the model"
    )
    assert told(optimizer="SGD") == (
        "the state is of AdamW with 1 parameter group, not of SGD with 1 parameter group"
    )
    assert "has no manifest.json" in told(folder=tmp_path)
    (tmp_path / "file").touch()
    assert "Not a directory" in told(folder=tmp_path / "file")

    manifest = state / "manifest.json"
    text = manifest.read_text()
    last = Path(state, json.loads(text)["files"][1]["name"])
    data = last.read_bytes()
    last.write_bytes(data[:-100])
    assert f"{last} is not as it was written" in told()
    last.write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
    assert "truncated or corrupted" in told()
    last.unlink()
    assert f"{last} cannot be read: No such file" in told()
    last.write_bytes(data)
    manifest.write_text(text[:-30])
    assert "manifest.json cannot be read" in told()
    manifest.write_text(text.replace('"format": 1', '"format": 0'))
    assert "state of format 0, this is format 1" in told()
    manifest.write_text(text)
    assert five.call(refused, str(state), 4, "AdamW", "children")[:3] == [None] * 3
