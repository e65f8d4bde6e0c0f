"""Checkpoints on ranks: what is kept, what is found again, what is refused, and in which words."""

import json
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpointed import Run, boxes_of, put_together, shapes_in
from gloo_ranks import first_ranks
from one_process import MAKE, OPTIMIZERS, share
from torch import nn

from naranhi import models
from naranhi.autograd import Recompute
from naranhi.checkpoint import CheckpointError, Checkpoints, storage
from naranhi.checkpoint.boxes import Box
from naranhi.checkpoint.parts import Part
from naranhi.checkpoint.writing import Write
from naranhi.data_parallel import DDP
from naranhi.zero import Zero

SHARES = 4  # of each step, whatever the number of ranks


def made(ranks, width=4, seed=0, steps=1, kind=torch.optim.AdamW, units=None, groups=None):
    """On the first ranks: (a sharded model, its optimizer), after some steps; None on the rest."""
    group = first_ranks(ranks)
    if dist.get_rank() >= ranks:
        return None
    torch.manual_seed(seed)
    model = nn.Sequential(*models.mlp(2, width, 6))
    zero = Zero(model, 3, group=group, units=units, param_groups=groups and groups(model))
    optimizer = kind(zero.param_groups, lr=0.25)
    for _ in range(steps):
        model(torch.ones(1, width)).sum().backward()
        zero.step(optimizer)
    return zero, optimizer


def numbers(zero, optimizer):
    """This rank's shards, and what the optimizer keeps for them."""
    return [
        [
            piece.tolist(),
            *(kept.tolist() for _, kept in sorted(optimizer.state.get(piece, {}).items())),
        ]
        for unit in zero.units
        for flat in unit.flats
        for piece in flat.pieces.values()
    ]


def refusal(function):
    """The words of the CheckpointError; None without one."""
    try:
        function()
    except CheckpointError as error:
        return str(error)
    return None


# --- ZeRO goes on, on any number of ranks --------------------------------------------------------


def run(ranks, work, stage, precision, steps, folder):
    """Steps of training from the newest checkpoint; saves at the end.

    Losses, and what the rank has at first and in the end."""
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
        units=[] if ranks == 2 else None,  # not the units of the others
        param_groups=[
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
    )
    optimizer, losses = OPTIMIZERS["adamw 0.001"](zero.param_groups), []
    with Checkpoints(folder, keep=1, group=group) as checkpoints:
        if steps[0]:
            assert checkpoints.load(zero, optimizer).step == steps[0]
        begin = boxes_of(zero, optimizer)
        for step in range(*steps):
            shares = [share(work, step, place) for place in range(SHARES)]
            count = sum(valid for _, _, valid in shares)
            total = torch.zeros(())
            own = shares[rank * SHARES // ranks : (rank + 1) * SHARES // ranks]
            with zero.no_sync():
                for inputs, targets, _ in own[:-1]:
                    part = loss(model(inputs), targets)
                    total += part.detach()
                    (part / count).backward()
            part = loss(model(own[-1][0]), own[-1][1])
            (part / count).backward()
            total += part.detach()
            dist.all_reduce(total, group=group)
            losses.append(total.item() / count)
            zero.clip_grad_norm_(1.0)
            zero.step(optimizer)
        checkpoints.save(steps[1], zero, optimizer)
        assert checkpoints.steps() == [steps[1]]
    return losses, begin, boxes_of(zero, optimizer)


@pytest.mark.parametrize(
    "work, stage, precision",
    [("mlp", 1, "fp32"), ("tied gpt2", 2, "fp32"), ("tied gpt2", 3, "fp32"), ("mlp", 3, "bf16")],
)
def test_training_goes_on_where_it_was_stopped(five, tmp_path, work, stage, precision):
    """On 4 ranks, then 2, then 1, then 4: each finds the very numbers that the one before left."""
    whole = five.call(run, 4, work, stage, precision, (0, 8), str(tmp_path / "whole"))[0][0]
    losses, left = [], None
    for i, ranks in enumerate([4, 2, 1, 4]):
        steps, folder = (2 * i, 2 * i + 2), tmp_path / "state"
        answers = five.call(run, ranks, work, stage, precision, steps, str(folder))[:ranks]
        shapes = shapes_in(folder / f"step-{steps[1]:08d}")
        if i:
            at_first = put_together([begin for _, begin, _ in answers], shapes)
            assert at_first.keys() == left.keys()
            assert all(torch.equal(at_first[name], tensor) for name, tensor in left.items())
        left = put_together([end for *_, end in answers], shapes)
        losses += answers[0][0]
    bound = {"rel": 2e-6} if precision == "fp32" else {"rel": 2e-2}
    assert losses == pytest.approx(whole, **bound)
    assert losses[-1] != losses[0]


def with_frozen(folder, kinds):
    """Save a model with frozen weights, a buffer and a scalar; load it into others of each kind."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return

    def new(seed, kind):
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3)]
        layers[2].scale = nn.Parameter(torch.rand(()))
        layers[0].requires_grad_(False)
        layers[1].register_buffer("fleeting", torch.full((1,), float(seed)), persistent=False)
        model = nn.Sequential(*layers)
        if kind[0] == "recompute":
            return nn.Sequential(*map(Recompute, layers)), model, model.parameters()
        if kind[0] == "ddp":
            return DDP(model, group), model, model.parameters()
        zero = Zero(model, kind[0], group=group, precision=kind[1])
        return zero, model, zero.param_groups

    outputs = []
    for number, kind in enumerate(kinds):
        state, model, params = new(number, kind)
        params = [p for p in params if isinstance(p, dict) or p.requires_grad]
        optimizer = torch.optim.SGD(params, lr=0.1)
        with Checkpoints(folder, group=group) as checkpoints, torch.no_grad():
            if number:
                assert checkpoints.load(state, optimizer).step == 7
                assert model[1].fleeting == number
            else:
                model.train()(torch.rand(4, 3))  # running statistics
                checkpoints.save(7, state, optimizer)
            outputs.append(model.eval()(torch.ones(1, 3)))
            assert torch.equal(outputs[0], outputs[-1]), kind
        if kind[0] != "recompute":
            state.close()


@pytest.mark.parametrize("stage, precision", [(1, "fp32"), (3, "fp32"), (3, "bf16")])
def test_what_is_not_trained_is_saved_too(five, tmp_path, stage, precision):
    """And by its name: into DDP, into what is recomputed, and into other stages."""
    kinds = [(stage, precision), (2, precision)]
    kinds += [("recompute",), ("ddp",), (3, "fp32")] if precision == "fp32" else []
    five.call(with_frozen, str(tmp_path / "state"), kinds)


# --- what is committed, and what is not ----------------------------------------------------------


def life(folder):
    """Saves in the foreground and in the background, with a schedule, on three ranks."""
    made_of = made(3)
    if made_of is None:
        return None
    zero, optimizer = made_of
    group, answers = first_ranks(3), {}
    with Checkpoints(folder, keep=2, group=group) as checkpoints:
        assert checkpoints.steps() == []
        answers["nothing yet"] = refusal(lambda: checkpoints.load(zero, optimizer))
        checkpoints.save(1, zero, optimizer, note="one")
        before = numbers(zero, optimizer)
        write, changed = Write.run, threading.Event()
        Write.run = lambda *args: (changed.wait(), write(*args))  # no earlier than the next step
        checkpoints.save_async(2, zero, optimizer, note={"position": [2, 0.5], "of": torch.ones(2)})
        zero.model(torch.ones(1, 4)).sum().backward()
        zero.step(optimizer)  # meanwhile: the copy does not change
        after = numbers(zero, optimizer)
        assert after != before
        changed.set()
        checkpoints.wait()
        Write.run = write
        checkpoints.save(30, zero, optimizer)
        answers["steps"] = checkpoints.steps()
        saved = checkpoints.load(zero, optimizer, step=2)
        assert (saved.step, saved.skipped) == (2, {}) and numbers(zero, optimizer) == before
        assert saved.state["note"]["position"] == [2, 0.5]
        assert torch.equal(saved.state["note"]["of"], torch.ones(2))
        assert checkpoints.load(zero, optimizer).step == 30
        assert numbers(zero, optimizer) == after
        for step in 30, 29, -1, True, "x":
            answers[f"step {step}"] = refusal(lambda step=step: checkpoints.save(step, zero))
        answers["no such"] = refusal(lambda: checkpoints.load(zero, optimizer, step=7))
        checkpoints.save(31, zero)  # without an optimizer
        assert refusal(lambda: checkpoints.load(zero)) is None
        answers["optimizer"] = refusal(lambda: checkpoints.load(zero, optimizer))
        answers["differ"] = refusal(
            lambda: checkpoints.save(40, zero, optimizer, position=dist.get_rank())
        )
        answers["object"] = refusal(lambda: checkpoints.save(40, zero, note=Path("x")))
        answers["function"] = refusal(lambda: checkpoints.save(40, zero, note=lambda: None))
        with zero.gathered():
            answers["gathered"] = refusal(lambda: checkpoints.save(40, zero, optimizer))
        answers["other optimizer"] = refusal(
            lambda: checkpoints.save(40, zero, torch.optim.SGD(nn.Linear(1, 1).parameters()))
        )
        if dist.get_rank() == 1:  # not as the others have it
            optimizer.param_groups[0]["lr"] = 0.5
        answers["rates"] = refusal(lambda: checkpoints.save(40, zero, optimizer))
        optimizer.param_groups[0]["lr"] = 0.25
        piece = next(iter(optimizer.state))
        optimizer.state[piece]["shape"] = torch.ones(2, 3)
        answers["shape"] = refusal(lambda: checkpoints.save(40, zero, optimizer))
        del optimizer.state[piece]["shape"]
        with pytest.raises(ValueError, match="keep must be a whole number of at least 1"):
            Checkpoints(folder, keep=0, group=group)
        return answers


def test_the_life_of_checkpoints(five, tmp_path):
    folder = tmp_path / "runs" / "a"
    foreign = ["step-7", "step-00000001.bak", "notes.txt", "rank-0-0123456789abcdef.pt"]
    left_over = ["step-00000009.part", "step-00000003.old"]  # by saves that were killed
    for name in [*foreign, *left_over]:
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("precious")
    first, *others = five.call(life, str(folder))[:3]
    assert others == [first, first], "the same on every rank"
    assert all((folder / name / "file").exists() for name in foreign)
    names = {path.name for path in folder.iterdir()} - {*foreign}
    assert names == {".lock", "step-00000030", "step-00000031"}
    assert first["steps"] == [2, 30], "the two newest"
    words = {
        "nothing yet": f"{folder} has no checkpoint: nothing was saved there, or a save was not "
        "finished",
        "step 30": f"{folder} has a checkpoint of step 30 already, and this is step 30: give a run",
        "step 29": "delete those from step 30 on",
        "step -1": "step must be a whole number of at least 0, not -1",
        "step True": "not True",
        "step x": "not 'x'",
        "no such": f"{folder} has no checkpoint of step 7: it has 2, 30, or a save was not "
        "finished",
        "optimizer": "the checkpoint is of a model without an optimizer, not of AdamW with 1 "
        "parameter group; without an optimizer, load reads the model alone",
        "differ": "position: ",
        "object": "which is not read from files: save plain values and tensors",
        "function": "pickle",
        "gathered": "inside of a gathered() block: leave the block first",
        "other optimizer": "this optimizer does not work on the shards of this model",
        "rates": "the optimizer of rank 0 is AdamW with",
        "shape": "AdamW keeps shape of shape (2, 3) for 0.up.",
    }
    assert first.keys() == words.keys() | {"steps"}
    for what, expected in words.items():
        assert expected in first[what], what


def interrupted(folder):
    """Saves that fail on one rank, at each place where they can: what they say."""
    made_of = made(2)
    if made_of is None:
        return None
    group, rank, answers = first_ranks(2), dist.get_rank(), []
    original = storage.write

    def full(path, data):
        original(path, data[:10])
        raise OSError(28, "No space left on device")

    with Checkpoints(folder, keep=1, group=group) as checkpoints:
        checkpoints.save(1, *made_of)
        for name in "rest.pt", "manifest.json":
            storage.write = lambda path, data, name=name: (full if path.name == name else original)(
                path, data
            )
            answers.append(refusal(lambda: checkpoints.save(2, *made_of)))
            storage.write = original
        original_open = Path.open
        if rank == 1:  # its shards

            def no_room(path, mode="r", *more):
                if path.suffix == ".distcp":
                    raise OSError(28, "No space left on device")
                return original_open(path, mode, *more)

            Path.open = no_room
        answers.append(refusal(lambda: checkpoints.save(2, *made_of)))
        checkpoints.save_async(2, *made_of)  # and in the background: what follows raises it
        answers.append(refusal(checkpoints.wait))
        checkpoints.save_async(2, *made_of)
        answers.append(refusal(lambda: checkpoints.save(3, *made_of)))
        Path.open = original_open
        assert checkpoints.steps() == [1] and refusal(checkpoints.wait) is None
        left = sorted(path.name for path in Path(folder).iterdir())
        assert checkpoints.load(*made_of).step == 1
        checkpoints.save_async(2, *made_of)
    assert checkpoints.steps() == [2]
    return answers, left


def test_a_save_that_fails_leaves_the_one_before_and_no_rubbish(five, tmp_path):
    (answers, left), (others, _) = five.call(interrupted, str(tmp_path / "state"))[:2]
    assert answers == others
    expected = ["on rank 0: [Errno 28] No space left on device"] * 2
    expected += ["on rank 1: [Errno 28] No space left on device"] * 3
    assert answers == expected
    assert left == [".lock", "step-00000001"]


# --- what cannot be loaded -----------------------------------------------------------------------


def answers_of(folder, changes):
    """What load says on three ranks, where nothing has changed: by {name: options of `made`}."""
    answers = {}
    for name, options in changes.items():
        made_of = made(3, seed=1, steps=0, **options)
        if made_of is None:
            continue
        zero, optimizer = made_of
        before = numbers(zero, optimizer)
        with Checkpoints(folder, group=first_ranks(3)) as checkpoints:
            answers[name] = refusal(lambda: checkpoints.load(zero, optimizer))  # noqa: B023
        if answers[name]:
            assert numbers(zero, optimizer) == before
            assert optimizer.param_groups[0]["lr"] == 0.25
    return answers


def by_dimension(model):
    return [{"params": [p for p in model.parameters() if p.dim() == dim]} for dim in (2, 1)]


def turned(model):
    return by_dimension(model)[::-1]


def saved_twice(folder, groups=None):
    made_of = made(2, groups=groups)
    if made_of:
        with Checkpoints(folder, group=first_ranks(2)) as checkpoints:
            checkpoints.save(10, *made_of)
            checkpoints.save(20, *made_of)


def test_another_model_or_optimizer_is_refused(five, tmp_path):
    five.call(saved_twice, str(tmp_path / "a"), by_dimension)
    same = {"groups": by_dimension}
    changes = {
        "width": {**same, "width": 5},
        "optimizer": {**same, "kind": torch.optim.SGD},
        "one group": {},
        "turned": {"groups": turned},
        "fine": {**same, "units": []},
    }
    told = five.call(answers_of, str(tmp_path / "a"), changes)
    assert told[0] == told[1] == told[2]
    assert told[0] == {
        "width": "parameter 0.up.weight has shape [6, 4] and dtype float32 in the checkpoint, and "
        "shape [6, 5] and dtype float32 in the model",
        "optimizer": "the checkpoint is of AdamW with 2 parameter groups, not of SGD with 2 "
        "parameter groups; without an optimizer, load reads the model alone",
        "one group": "the checkpoint is of AdamW with 2 parameter groups, not of AdamW with 1 "
        "parameter group; without an optimizer, load reads the model alone",
        "turned": "parameter 0.up.weight is in parameter group 0 in the checkpoint, and in 1 in "
        "the optimizer",
        "fine": None,
    }


def loaded(folder, step=None):
    """(the step that was loaded, what was skipped, warnings), or what load says."""
    made_of = made(3, steps=0)
    if made_of is None:
        return None
    with (
        warnings.catch_warnings(record=True) as caught,
        Checkpoints(folder, group=first_ranks(3)) as checkpoints,
    ):
        warnings.simplefilter("always", UserWarning)
        try:
            saved = checkpoints.load(*made_of, step=step)
        except CheckpointError as error:
            return str(error)
        if saved.skipped:  # what is damaged is replaced by the run that goes on
            checkpoints.save(20, *made_of)
        return saved.step, saved.skipped, [str(w.message) for w in caught if "inst" in str(w)]


def test_what_is_damaged_is_named_and_the_one_before_is_loaded(five, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    five.call(saved_twice, str(good))

    def damaged(name, change, step=20):
        """What load says where the newest has a file changed."""
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        file = bad / f"step-000000{step}" / name
        change(file)
        told = five.call(loaded, str(bad))[:3]
        assert [answer[:2] for answer in told] == [told[0][:2]] * 3, "the same on every rank"
        assert (told[0][0], *told[0][1]) == (10, 20)
        assert told[0][2] == [f"loading step 10 instead: {told[0][1][20]}"] and not told[1][2]
        assert five.call(loaded, str(bad))[0][:2] == (20, {}), "saved again, and whole"
        return told[0][1][20].replace(str(file), name)

    def truncated(file):
        file.write_bytes(file.read_bytes()[:-100])

    def flipped(file):
        data = file.read_bytes()
        file.write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])

    assert re.fullmatch(
        r"__1_0.distcp is not as it was written: [\d,]+ bytes of [\d,]+",
        damaged("__1_0.distcp", truncated),
    )
    assert damaged("__0_0.distcp", flipped).endswith("with another digest")
    assert "another digest" in damaged(".metadata", flipped)
    assert damaged("rest.pt", Path.unlink) == "rest.pt cannot be read: No such file or directory"
    assert damaged("manifest.json", Path.unlink).startswith("manifest.json cannot be read: No such")
    assert "manifest.json is not as it was written (" in damaged("manifest.json", truncated)
    assert "(another digest)" in damaged(
        "manifest.json",
        lambda file: file.write_text(file.read_text().replace('"step": 2', '"step": 3')),
    )

    for step in 10, 20:
        (bad / f"step-000000{step}" / "rest.pt").unlink()
    told = five.call(loaded, str(bad))[1]
    assert told.startswith(f"{bad} has no checkpoint that can be loaded: ")
    assert told.count("rest.pt cannot be read") == 2
    told = five.call(loaded, str(bad), 20)[1]
    assert told.startswith(f"step 20 of {bad} cannot be loaded: ") and told.count("rest.pt") == 1
    told = five.call(loaded, str(good), 20)
    assert told[0] == (20, {}, [])

    manifest = good / "step-00000020" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    assert five.call(loaded, str(good))[2] == (
        f"{good / 'step-00000020'} was saved in format 2 by a newer version of naranhi; this one "
        "reads format 1: use the version that saved it"
    ), "not the one before, as if this one were damaged"
    half = tmp_path / "half"
    half.mkdir()
    shutil.copytree(good / "step-00000010", half / "step-00000010.part")
    assert (
        "has no checkpoint: nothing was saved there, or a save was not finished"
        in five.call(loaded, str(half))[0]
    )
    (tmp_path / "file").touch()
    assert "Not a directory" in five.call(loaded, str(tmp_path / "file"))[0]


# --- what cannot be saved ------------------------------------------------------------------------


def wrong_shards(folder):
    """Shards that are not the whole, or not of one model."""
    made_of = made(2)
    if made_of is None:
        return None
    group, rank, answers = first_ranks(2), dist.get_rank(), []
    zero, optimizer = made_of
    original = Part.boxes
    checkpoints = Checkpoints(folder, group=group)
    for wrong in "gap", "overlap", "shape":

        def boxes(part, memory, wrong=wrong):
            right = original(part, memory)
            if part.name != "0.up.weight":
                return right
            if rank:  # which has no element of it
                return right._replace(shape=(3, 8)) if wrong == "shape" else right
            if wrong == "gap":
                return right._replace(views=dict(list(right.views.items())[1:]))
            if wrong == "overlap":
                twice = {Box((1, 1), (1, 1)): memory[5:6].view(1, 1)}
                return right._replace(views=right.views | twice)
            return right

        Part.boxes = boxes
        answers.append(refusal(lambda: checkpoints.save(1, zero, optimizer)))
        Part.boxes = original
    alone = Checkpoints(Path(folder) / "alone", group=dist_group_of_one())
    answers.append(refusal(lambda: alone.save(1, zero, optimizer)))  # the other rank is missing
    answers.append(refusal(lambda: Checkpoints(Path(folder) / "file", group=group).save(1, zero)))
    return answers


def dist_group_of_one():
    """A group of this rank alone; of both, the first makes the first one."""
    groups = [dist.new_group([rank], use_local_synchronization=True) for rank in range(2)]
    return groups[dist.get_rank()]


def test_shards_that_are_not_the_whole_are_refused(five, tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "file").touch()
    answers, others = five.call(wrong_shards, str(folder))[:2]
    assert answers[:3] == others[:3]
    gap, overlap, shape, alone, file = answers
    what = "the ranks' shards of parameters.0.up.weight, of shape [6, 4], are not the whole: "
    assert gap.startswith(what) and "elements are on no rank; every rank that has a part" in gap
    assert overlap.startswith(what) and " overlap; " in overlap
    assert (
        "parameters.0.up.weight has shape [6, 4] and dtype float32 on rank 0, shape [3, 8]" in shape
    )
    assert "are on no rank; every rank that has a part of the model has to take part" in alone
    assert "File exists" in file
    assert {path.name for path in folder.iterdir()} == {"file"}, "nothing was written"


OTHER = """
import sys, time
from naranhi.checkpoint.storage import Storage
storage = Storage(sys.argv[1])
storage.claim()
print("claimed", flush=True)
time.sleep(600)
"""


def claims(folder):
    made_of = made(2)
    if made_of is None:
        return None
    with Checkpoints(folder, group=first_ranks(2)) as checkpoints:
        return refusal(lambda: checkpoints.save(1, *made_of)), refusal(checkpoints.claim)


def test_two_runs_do_not_save_into_one_folder(five, tmp_path):
    """And one that was killed does not stand in the way."""
    other = subprocess.Popen([sys.executable, "-c", OTHER, tmp_path], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"claimed\n"
        first, second = five.call(claims, str(tmp_path))[:2]
        assert first == second and first[0] == first[1]
        assert first[0].startswith(f"on rank 0: {tmp_path} is in use: process {other.pid} on "), (
            first[0]
        )
        assert first[0].endswith("saves into it; end that run, or give this one another folder")
        assert not any(storage.COMMITTED.match(path.name) for path in tmp_path.iterdir())
    finally:
        other.kill()
        other.communicate()
    assert five.call(claims, str(tmp_path))[0] == (None, None)


def on_a_full_disk(folder):
    """A disk that fills while saving in the background; then with room again."""
    group, rank = first_ranks(2), dist.get_rank()
    if rank >= 2:
        return None
    run = Run("zero3", group)
    run.step(0)
    with run.checkpoints(folder) as checkpoints:
        run.save(checkpoints, 1)
        filler = Path(folder) / "filler"
        if rank == 0:
            free = shutil.disk_usage(folder).free
            filler.write_bytes(bytes(max(free - 100_000, 0)))
        dist.barrier(group)
        run.save(checkpoints, 2, "save_async")
        told = refusal(checkpoints.wait)
        assert checkpoints.steps() == [1] and run.load(checkpoints).step == 1
        dist.barrier(group)
        if rank == 0:
            filler.unlink()
        dist.barrier(group)
        run.save(checkpoints, 2)
        return told, checkpoints.steps()


def test_a_disk_that_fills_while_saving(five, needs, tmp_path):
    needs("mount", "mount", as_root=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", tmp_path], check=True)
    try:
        (told, steps), (other, _) = five.call(on_a_full_disk, str(tmp_path))[:2]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert told == other and "No space left on device" in told
    assert steps == [1, 2]
