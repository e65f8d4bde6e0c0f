"""The recipes run as their readers run them, and print the losses of `single.py`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_dataset

from naranhi import data

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "src" / "recipes"
SCRIPTS = sorted(path.name for path in RECIPES.glob("*.py"))
# By .ci/run, and not in .venv: transformers would import it wherever it is imported itself.
ACCELERATE = RECIPES.parents[1] / "_build" / "accelerate"
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
LINE = re.compile(r"step (\d+): loss ([\d.]+)")
STEPS = 3
# AdamW's steps are the same for gradients that are all too large by a factor.
SGD = ["--optimizer", "sgd", "--lr", "0.1"]


def losses(folder, command, steps=STEPS, **environment):
    """What a recipe prints, as {step: loss}."""
    done = subprocess.run(
        [*command, *SGD, "--steps", str(steps)],
        cwd=folder,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(step): float(loss) for step, loss in LINE.findall(done.stdout)}


def torchrun(ranks, script):
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(RECIPES / script),
    ]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """{step: loss} of one process."""
    found = losses(tmp_path_factory.mktemp("single"), [sys.executable, RECIPES / "single.py"])
    assert list(found) == list(range(STEPS))
    assert found[0] - found[2] > 0.1, "or the weights' changes would not be told"
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "script",
    [
        "ddp.py",
        "fsdp.py",
        "fsdp_tp.py",
        "pipeline.py",
        "deepspeed_zero.py",
        "deepspeed_pipeline.py",
    ],
)
def test_losses_are_those_of_one_process(tmp_path, single, script, ranks):
    options = ["--tp", str(min(2, ranks))] if script == "fsdp_tp.py" else []
    found = losses(tmp_path, [*torchrun(ranks, script), *options])
    assert found == pytest.approx(single, abs=5e-6), script


def test_a_pipeline_of_stages_of_unequal_length(tmp_path, single):
    assert losses(tmp_path, torchrun(3, "pipeline.py")) == pytest.approx(single, abs=5e-6)


def test_ranks_that_tensor_parallelism_does_not_divide_are_refused(tmp_path):
    command = [*torchrun(1, "fsdp_tp.py"), "--tp", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "--tp 2 has to divide the number of ranks, which is 1" in done.stderr


@pytest.mark.skipif(
    not ACCELERATE.is_dir() and not importlib.util.find_spec("accelerate"),
    reason="the Trainer needs accelerate, which the book does without: "
    "pip install --no-deps --target _build/accelerate accelerate",
)
def test_the_trainer_has_the_losses_of_one_process(tmp_path, single):
    found = losses(tmp_path, torchrun(2, "trainer.py"), PYTHONPATH=str(ACCELERATE))
    assert found == pytest.approx(single, abs=5e-6)


@pytest.mark.parametrize("script, fewer", [("fsdp.py", 1), ("deepspeed_zero.py", 2)])
def test_a_saved_state_goes_on(tmp_path, single, script, fewer):
    """In each step the loss of a run that was never cut; FSDP's also on fewer ranks."""
    save = ["--save", str(tmp_path / "state")]
    before = losses(tmp_path, [*torchrun(2, script), *save], 2)
    after = losses(tmp_path, [*torchrun(fewer, script), *save, "--resume"], STEPS)
    assert (list(before), list(after)) == ([0, 1], [2])
    assert before | after == pytest.approx(single, abs=5e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_goes_on_after_a_crash(tmp_path, stage):
    """The losses of a run without a crash, to the last digit that is printed."""
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def run(folder, *options):
        script = torchrun(2, "deepspeed_resume.py")
        command = [*script, "--deepspeed_config", "config.json", "--save", folder, *options]
        done = subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
        )
        return done, {int(step): float(loss) for step, loss in LINE.findall(done.stdout)}

    done, through = run("through")
    assert done.returncode == 0, done.stderr
    assert list(through) == list(range(8))
    assert through[7] < through[0] - 0.05
    crashed, before = run("state", "--crash-at", "5")
    assert crashed.returncode != 0
    assert "failed in step 5, as ordered" in crashed.stderr
    done, after = run("state", "--resume")
    assert done.returncode == 0, done.stderr
    assert (list(before), list(after)) == ([0, 1, 2, 3, 4], [4, 5, 6, 7])
    assert before | after == through


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_recipe_is_short_and_needs_nothing_of_ours(script):
    text = (RECIPES / script).read_text()
    assert len(text.splitlines()) < 120
    assert "naranhi" not in text


def test_the_text_is_that_of_the_book():
    passages = load_dataset(str(RECIPES / "small" / "text"), split="train")["context"]
    assert list(passages) == data.unique(data.contexts())


def test_without_a_hub_the_error_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, RECIPES / "single.py", "--model", "gpt2"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "couldn't connect to 'https://huggingface.co'" in done.stderr
    assert "offline mode" in done.stderr
