"""`naranhi.train --export`: the trained model in the form of `transformers`."""

import json
import os
import re
import shutil
from functools import partial

import pytest
import small_gpt2
import torch
import torch.distributed as dist
from exported import loss_of, run
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from naranhi import data, models, train


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return [*small_gpt2.write(folder), "--batch=8", "--microbatches=2", "--lr=1e-2"]


@pytest.mark.parametrize("tied", [[], ["--untied"]])
def test_transformers_reads_what_a_mesh_has_trained(eight, small, tmp_path, tied):
    """As one process has trained it; and another run begins with it."""
    passage = data.contexts()[0]
    exports = {}
    for ranks, mesh in [(1, []), (4, ["--pp=2", "--tp=2", "--sequence-parallel"])]:
        folder = tmp_path / f"of {ranks}"
        answers = eight(ranks, run, [*small, *tied, *mesh, "--steps=4", "--export", folder])
        assert answers[0][1][-1] == f"the model is in {folder}"
        exports[ranks] = loss_of(folder, passage)
        assert [path.name for path in tmp_path.glob(f"{folder.name}*")] == [folder.name]
    before = loss_of(small[1], passage)
    assert exports[4] == pytest.approx(exports[1], abs=1e-5)
    assert exports[1] < before - 0.1, "it has learned"
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] == (not tied)

    again, other = [], tmp_path / "again"
    for more in tied, []:  # what is untied stays so, with --untied and without
        options = [*small[2:], *more, "--model", folder, "--steps=1", "--lr=1e-12"]
        again.append(eight(2, run, [*options, "--tp=2", "--export", other])[0][0][0])
        assert loss_of(other, passage) == pytest.approx(exports[4], abs=1e-5)
        shutil.rmtree(other)
    assert again[0] == again[1]
    longer = eight(1, run, [*small, *tied, "--steps=1"])[0][0][0]
    assert again[0] < longer - 0.1, "the first loss of a run that begins where the other ended"


def test_a_run_that_is_resumed_at_its_end_only_exports(eight, small, tmp_path):
    """From the shards of four ranks, the random model of the book, in three steps."""
    base = ["--steps", 2, "--untied", "--save", tmp_path / "run", "--resume"]
    assert len(eight(4, run, [*base, "--dp=2", "--pp=2", "--zero=3"])[0][0]) == 2
    losses, said = eight(1, run, [*base, "--export", tmp_path / "model"])[0]
    assert losses == [] and said[-1].startswith("the model is in ")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "model").config
    assert (config.n_layer, config.n_embd) == (12, 64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert config.eos_token_id == tokenizer.eos_token_id is not None
    assert tokenizer.model_max_length == config.n_positions


def test_what_a_training_leaves_alone_is_the_sources(eight, tmp_path):
    """Its dropout, and how it generates."""
    options = small_gpt2.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_pdrop": 0.3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    for number, more in enumerate(([], ["--dropout=0.2"])):
        folder = tmp_path / str(number)
        eight(1, run, [*options, "--steps=1", *more, "--export", folder])
        found = AutoModelForCausalLM.from_pretrained(folder)
        assert (found.config.attn_pdrop, found.config.resid_pdrop) == (0.3, 0.1)
        assert found.generation_config.max_new_tokens == 7


def exported_midway(arguments, folder):
    """On a rank: losses, where the model is exported after the first step, and where it is not."""
    losses = []
    for number, exports in enumerate((True, False)):
        options = train.parse([*map(str, arguments), "--export", f"{folder}/{number}"])
        with train.Training(options) as training:
            losses.append([])
            for step in training:
                losses[-1].append(step.loss)
                if exports and step.step == 0:
                    training.export()
            weights = [p.detach().clone() for p in training.pipeline.parameters()]
    return losses, weights


def test_an_export_draws_no_random_numbers(eight, small, tmp_path):
    """Or dropout would be another afterwards, on rank 0 alone."""
    options = [*small, "--tp=2", "--dropout=0.2", "--steps=3"]
    for (exported, plain), _ in eight(2, exported_midway, options, str(tmp_path)):
        assert exported == plain


def refused(folder, fails=None):
    arguments = ["--steps=1", "--batch=4", "--export", folder]
    if not fails:  # before anything is trained
        with pytest.raises(train.UsageError) as error:
            train.Training(train.parse(arguments))
        return str(error.value)
    if fails and dist.get_rank() == 0:
        original = models.transformers_model
        models.transformers_model = partial(fails, original)
        try:
            return run(arguments)
        finally:
            models.transformers_model = original
    return run(arguments)


def full(original, *given):
    raise Exception("No space left on device (os error 28)")  # as tokenizers raises it


def test_a_folder_that_cannot_be_written_is_told_before_and_after(eight, tmp_path):
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "notes").touch()
    file.touch()
    for folder, words in [
        (taken, f"--export {taken} is there already: name a new folder"),
        (file, f"--export {file} is there already"),
        (file / "below", re.escape("--export: [Errno")),
    ]:
        said = eight(2, refused, str(folder))
        assert said[0] == said[1]
        assert re.search(str(words), said[0]), said[0]
    said = eight(2, refused, str(tmp_path / "new"), full)
    assert said[0] == said[1]
    assert f"--export {tmp_path / 'new'} is not written (No space left on device" in said[0]
    assert not [*tmp_path.glob("new*")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--export FOLDER/run --save FOLDER/run", "would have --save FOLDER/run in it"),
        ("--export FOLDER/run --save FOLDER/run/steps", "would have --save FOLDER/run/steps in it"),
        ("--export FOLDER/x --log-file FOLDER/x/log", "would have --log-file FOLDER/x/log in it"),
        ("--export .", "--export . is the current folder: name a new one in it"),
        ("--export /proc", "--export /proc is a mount point: name a folder in it"),
        (f"--export FOLDER/{'long' * 62}", "--export: [Errno 36] File name too long"),
    ],
)
def test_what_would_only_fail_in_the_end_is_refused_before(eight, tmp_path, options, message):
    options, message = (text.replace("FOLDER", str(tmp_path)) for text in (options, message))
    for said in eight(2, told_before, f"{options} --batch=4"):
        assert message in said
    assert not [*tmp_path.iterdir()]


def told_before(options):
    with pytest.raises(train.UsageError) as error:
        train.Training(train.parse(options.split()))
    return str(error.value)


def test_a_link_to_an_empty_folder_is_followed(eight, small, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    eight(1, run, [*small, "--steps=1", "--export", tmp_path / "link"])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "config.json").exists()


def test_an_empty_folder_is_filled_and_nothing_beside_it_touched(eight, small, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.part").touch()
    losses, _ = eight(1, run, [*small, "--steps=1", "--export", f"{tmp_path}/empty/"])[0]
    found = {path.name for path in (tmp_path / "empty").iterdir()}
    assert len(losses) == 1 and {"config.json", "model.safetensors", "tokenizer.json"} <= found
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "empty.part"}


def full_when_renamed(folder):
    """On a rank: what is told of a folder that is filled while the training runs."""
    training = train.Training(train.parse(["--steps=1", "--batch=4", "--export", folder]))
    with training, pytest.raises(train.UsageError) as error:
        if dist.get_rank() == 0:
            os.makedirs(f"{folder}/notes")
        training.export()
    return str(error.value)


def test_a_folder_that_is_filled_meanwhile_is_left_alone(eight, tmp_path):
    said = eight(2, full_when_renamed, str(tmp_path / "taken"))
    assert said[0] == said[1] and "is not written ([Errno 39] Directory not empty" in said[0]
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes"]


def test_a_state_of_another_model_is_refused():
    config = models.gpt2_config(hidden=16, blocks=2)
    state = nn.ModuleList(models.gpt2(config)).state_dict()
    tensors = dict(models.gpt2_model(state, config).named_parameters())
    assert torch.equal(tensors["transformer.h.1.mlp.c_fc.weight"], state["2.block.mlp.c_fc.weight"])
    apart = state | {"3.lm_head.weight": state["0.wte.weight"] + 1}
    with pytest.raises(ValueError, match=r"3.lm_head.weight is not 0.wte.weight: .* \(tied=False"):
        models.gpt2_model(apart, config)
    del state["3.lm_head.weight"]
    models.gpt2_model(state, config)  # tied, so the first name is enough
    with pytest.raises(ValueError, match=r"3.lm_head.weight has shape None in the state"):
        models.gpt2_model(state, config, tied=False)
    assert config.tie_word_embeddings, "the caller's own"
    more = models.gpt2_config(hidden=16, blocks=1)
    with pytest.raises(ValueError, match=r"has shape .* in the state, and .* in a GPT-2 of this"):
        models.gpt2_model(state, more)
