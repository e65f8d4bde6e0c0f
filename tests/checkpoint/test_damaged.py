"""What cannot be loaded: another model, a damaged checkpoint; and in which words."""

import json
import re
import shutil
import warnings
from pathlib import Path

import torch
from checkpointed import made, numbers, refusal
from gloo_ranks import first_ranks

from naranhi.checkpoint import CheckpointError, Checkpoints, files


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
        "optimizer": "the checkpoint was saved with AdamW with 2 parameter groups, and load was "
        "given SGD with 2 parameter groups; without an optimizer, load reads the model alone",
        "one group": "the checkpoint was saved with AdamW with 2 parameter groups, and load was "
        "given AdamW with 1 parameter group; without an optimizer, load reads the model alone",
        "turned": "parameter 0.up.weight is in parameter group 0 in the checkpoint, and in 1 in "
        "the optimizer",
        "fine": None,
    }


def loaded(folder, step=None):
    """(the step that was loaded, what was skipped, warnings), or what load says."""
    made_of = made(3, steps=0)
    if made_of is None:
        return None
    files.APPEARS = 0.2  # seconds; no file of these is late
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
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": "2.0"}))
    assert (
        "was saved in format 2.0 by another version of naranhi" in five.call(loaded, str(good))[2]
    )
    half = tmp_path / "half"
    half.mkdir()
    shutil.copytree(good / "step-00000010", half / "step-00000010.part")
    assert (
        "has no checkpoint: nothing was saved there, or a save was not finished"
        in five.call(loaded, str(half))[0]
    )
    (tmp_path / "file").touch()
    assert "Not a directory" in five.call(loaded, str(tmp_path / "file"))[0]
