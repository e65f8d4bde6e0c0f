"""`naranhi.train --export`: the trained model in the form of `transformers`."""

import json
import os
import re
from functools import partial

import pytest
import small_gpt2
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from naranhi import data, models, train


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return [*small_gpt2.write(folder), "--batch=8", "--microbatches=2", "--lr=1e-2"]


def run(arguments):
    """On a rank: losses and what rank 0 says; what a user is told, if it is refused."""
    said = []
    try:
        losses = train.train(train.parse([str(word) for word in arguments]), say=said.append)
    except train.UsageError as error:
        return str(error)
    return losses, said


def loss_of(folder, file):
    """By transformers alone: the loss of a passage."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(file, return_tensors="pt").input_ids[:, :24]
    with torch.no_grad():
        return model(tokens, labels=tokens).loss.item()


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
        assert not folder.with_name(f"{folder.name}.part").exists()
    before = loss_of(small[1], passage)
    assert exports[4] == pytest.approx(exports[1], abs=1e-5)
    assert exports[1] < before - 0.1, "it has learned"
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] == (not tied)

    options = [*small[2:], *tied, "--model", folder, "--steps=1"]
    again = eight(1, run, options)[0][0][0]
    longer = eight(1, run, [*small, *tied, "--steps=1"])[0][0][0]
    assert again < longer - 0.1, "the first loss of a run that begins where the other ended"


def test_a_run_that_is_resumed_at_its_end_only_exports(eight, small, tmp_path):
    """From the shards of four ranks, the random model of the book, in three steps."""
    base = ["--steps", 2, "--untied", "--save", tmp_path / "run", "--resume"]
    assert len(eight(4, run, [*base, "--dp=2", "--pp=2", "--zero=3"])[0][0]) == 2
    losses, said = eight(1, run, [*base, "--export", tmp_path / "model"])[0]
    assert losses == [] and said[-1].startswith("the model is in ")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "model").config
    assert (config.n_layer, config.n_embd) == (12, 64)


def refused(folder, fails=None):
    arguments = ["--steps=1", "--batch=4", "--export", folder]
    if not fails:  # before anything is trained
        with pytest.raises(train.UsageError) as error:
            train.Training(train.parse(arguments))
        return str(error.value)
    if fails and dist.get_rank() == 0:
        original = models.gpt2_model
        models.gpt2_model = partial(fails, original)
        try:
            return run(arguments)
        finally:
            models.gpt2_model = original
    return run(arguments)


def full(original, *given):
    raise OSError(28, "No space left on device")


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
    assert "--export: [Errno 28] No space left on device" in said[0]
    assert not (tmp_path / "new").exists()


def test_an_empty_folder_is_filled_by_this_export_alone(eight, small, tmp_path):
    (tmp_path / "empty").mkdir()
    killed = tmp_path / "empty.part"
    killed.mkdir()
    (killed / "model-00002-of-00002.safetensors").touch()
    losses, _ = eight(1, run, [*small, "--steps=1", "--export", f"{tmp_path}/empty/"])[0]
    found = {path.name for path in (tmp_path / "empty").iterdir()}
    assert len(losses) == 1 and {"config.json", "model.safetensors", "tokenizer.json"} <= found
    assert "model-00002-of-00002.safetensors" not in found and not killed.exists()


def full_when_renamed(folder):
    """On a rank: what is told of a folder that is filled while the training runs."""
    training = train.Training(train.parse(["--steps=1", "--batch=4", "--export", folder]))
    with training, pytest.raises(train.UsageError) as error:
        if dist.get_rank() == 0:
            os.makedirs(f"{folder}/notes")
        training.export(folder)
    return str(error.value)


def test_a_folder_that_is_filled_meanwhile_is_left_alone(eight, tmp_path):
    said = eight(2, full_when_renamed, str(tmp_path / "taken"))
    assert said[0] == said[1] and "--export: [Errno 39] Directory not empty" in said[0]
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes"]


def test_a_state_of_another_model_is_refused():
    config = models.gpt2_config(hidden=16, blocks=2)
    state = nn.ModuleList(models.gpt2(config)).state_dict()
    tensors = dict(models.gpt2_model(state, config).named_parameters())
    assert torch.equal(tensors["transformer.h.1.mlp.c_fc.weight"], state["2.block.mlp.c_fc.weight"])
    del state["3.lm_head.weight"]
    models.gpt2_model(state, config)  # tied, so the first name is enough
    with pytest.raises(ValueError, match=r"3.lm_head.weight has shape None in the state"):
        models.gpt2_model(state, config, tied=False)
    assert config.tie_word_embeddings, "the caller's own"
    more = models.gpt2_config(hidden=16, blocks=1)
    with pytest.raises(ValueError, match=r"has shape .* in the state, and .* in a GPT-2 of this"):
        models.gpt2_model(state, more)
