"""The recipes run as their readers run them, and print the losses of `single.py`.

Each is started by torchrun once: by chapter 17, or here if it is in `STARTED_HERE`. Other numbers
of ranks, and runs that go on where others have stopped, are forked ones (`forked.py`), which saves
minutes of importing.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
import torch
from datasets import load_dataset
from forked import Forked
from started import (
    ENVIRONMENT,
    IMPORTED,
    LINE,
    RECIPES,
    ROOT,
    STEPS,
    losses,
    small_gpt2,
    torchrun,
)

from naranhi import data

pytestmark = pytest.mark.slow

SCRIPTS = sorted(path.name for path in RECIPES.glob("*.py"))
# By .ci/run, and not in .venv: transformers would import it wherever it is imported itself.
ACCELERATE = ROOT / "_build" / "accelerate"
STARTED_HERE = {"deepspeed_pipeline.py", "trainer.py"}
needs_accelerate = pytest.mark.skipif(
    not ACCELERATE.is_dir() and not importlib.util.find_spec("accelerate"),
    reason="the Trainer needs accelerate, which the book does without: "
    "pip install --no-deps --target _build/accelerate accelerate",
)


@pytest.fixture(scope="module")
def with_accelerate():
    """As `torchrun` on two ranks, else as `forked`; and there is accelerate."""
    more = {"PYTHONPATH": os.pathsep.join([str(ACCELERATE), os.environ["PYTHONPATH"]])}
    with Forked(*IMPORTED, "transformers.trainer", **ENVIRONMENT | more) as server:

        def start(ranks, script, *options, folder):
            if ranks == 2:
                return torchrun(ranks, script, *options, folder=folder, **more)
            return server.run(ranks, RECIPES / script, *options, folder=folder)

        yield start


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
def test_losses_are_those_of_one_process(tmp_path, single, forked, script, ranks):
    options = ["--tp", str(min(2, ranks))] if script == "fsdp_tp.py" else []
    start = torchrun if ranks == 2 and script in STARTED_HERE else forked
    found = losses(start(ranks, script, *options, *STEPS, folder=tmp_path))
    assert found == pytest.approx(single, abs=5e-6), script


def test_a_pipeline_of_stages_of_unequal_length(tmp_path, single, forked):
    found = losses(forked(3, "pipeline.py", *STEPS, folder=tmp_path))
    assert found == pytest.approx(single, abs=5e-6)


def test_ranks_that_tensor_parallelism_does_not_divide_are_refused(tmp_path, forked):
    done = forked(1, "fsdp_tp.py", "--tp", "2", folder=tmp_path)
    assert done.returncode != 0
    assert "--tp 2 has to divide the number of ranks, which is 1" in done.stderr


def test_heads_that_tensor_parallelism_cannot_share_are_refused(tmp_path, forked):
    done = forked(3, "fsdp_tp.py", "--tp", "3", "--batch", "3", folder=tmp_path)
    assert done.returncode != 0
    assert "--tp 3 has to divide the model's 4 heads" in done.stderr


# For each tensor that dropout works on: where, on which rank, and what its mask is drawn from.
MASKS = """
import hashlib, os, runpy, sys
import torch
from torch.nn import functional

def reported(where, function):
    def report(*arguments, **keywords):
        state = hashlib.md5(torch.get_rng_state().numpy().tobytes()).hexdigest()
        sys.stdout.write(f"mask {where} {os.environ['RANK']} {state}\\n")  # at once, or they mix
        sys.stdout.flush()
        return function(*arguments, **keywords)
    return report

functional.dropout = reported("whole", functional.dropout)
functional.scaled_dot_product_attention = reported("heads", functional.scaled_dot_product_attention)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def masks(tmp_path):
    """`masks(start, ranks, script, *options)`: {where: what each rank draws its masks from}."""

    def masks_of(start, ranks, script, *options):
        (tmp_path / "masks.py").write_text(MASKS)
        dropout = {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "n_layer": 2}
        model = small_gpt2(tmp_path / "model", **dropout)
        program = [tmp_path / "masks.py", str(RECIPES / script)]
        done = start(ranks, *program, *model, *options, "--steps", "1", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        drawn = {"whole": [[] for _ in range(ranks)], "heads": [[] for _ in range(ranks)]}
        for where, rank, state in re.findall(r"mask (\w+) (\d+) (\w+)", done.stdout):
            drawn[where][int(rank)].append(state)
        assert {len(states) for states in drawn["whole"]} == {5}, "embeddings, and two in a block"
        assert {len(states) for states in drawn["heads"]} == {2}
        return drawn

    return masks_of


def test_ranks_of_a_tensor_group_drop_the_same_where_they_hold_the_same(masks, forked):
    """And other weights of attention, which is of other heads on each."""
    drawn = masks(forked, 4, "fsdp_tp.py", "--tp", "2")
    first, second, third, fourth = drawn["whole"]
    assert first == second and third == fourth
    assert not {*first} & {*third}, "they have other rows"
    assert len({state for states in drawn["heads"] for state in states}) == 8


@pytest.mark.parametrize("microbatches", ["3", "0"])
@pytest.mark.parametrize("script", ["pipeline.py", "deepspeed_pipeline.py"])
def test_micro_batches_that_do_not_divide_the_batch_are_refused(
    tmp_path, forked, script, microbatches
):
    """DeepSpeed would make four of 2 rows for three, and train on rows of the next step."""
    done = forked(1, script, *STEPS, "--microbatches", microbatches, folder=tmp_path)
    assert done.returncode != 0
    assert f"--microbatches {microbatches} has to divide --batch 8" in done.stderr


@pytest.mark.parametrize("script", ["ddp.py", "fsdp.py"])
def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path, forked, script):
    """With eight rows, sixteen ranks of two nodes would have none."""
    done = forked(2, script, *STEPS, "--batch", "3", folder=tmp_path)
    assert done.returncode != 0
    assert "--batch 3 has to be a multiple of the 2 ranks that share it" in done.stderr


def test_more_stages_than_micro_batches_are_refused(tmp_path, forked):
    done = forked(2, "pipeline.py", *STEPS, "--microbatches", "1", folder=tmp_path)
    assert done.returncode != 0
    assert "2 ranks: each needs a block" in done.stderr
    assert "as many --microbatches, of which there are 1" in done.stderr


def test_more_stages_than_layers_are_refused_by_deepspeeds_pipeline(tmp_path, forked):
    """The job script has 16 ranks, and the small model 15 layers."""
    model = small_gpt2(tmp_path / "model", n_layer=1)
    done = forked(5, "deepspeed_pipeline.py", *model, folder=tmp_path)
    assert done.returncode != 0
    assert "5 ranks: each needs a layer, and the model has 4" in done.stderr


GPUS_ON_RANK_1 = """
import os, runpy, sys
import torch

if os.environ["RANK"] == "1":
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_gpus_on_some_ranks_only_are_refused(tmp_path, forked):
    """Ranks that have chosen gloo would wait for those that have chosen NCCL."""
    (tmp_path / "gpus.py").write_text(GPUS_ON_RANK_1)
    done = forked(2, tmp_path / "gpus.py", RECIPES / "ddp.py", folder=tmp_path)
    assert done.returncode != 0
    assert "ranks [0] find no GPU, and the others do: all need one, or none" in done.stderr


@pytest.fixture
def shared(monkeypatch):
    """The module that the recipes share."""
    monkeypatch.syspath_prepend(RECIPES)
    import model_and_data

    return model_and_data


def test_more_steps_than_the_data_has_are_refused(shared):
    """514 steps of 8 rows are there."""
    shared.load_passages(shared.parser("").parse_args(["--steps", "514"]))
    with pytest.raises(
        SystemExit, match="--steps 515 of --batch 8: both are at least 1, and the data has"
    ):
        shared.load_passages(shared.parser("").parse_args(["--steps", "515"]))


@pytest.mark.parametrize("option", ["--batch=0", "--steps=-1"])
def test_numbers_from_1(shared, option):
    with pytest.raises(SystemExit, match=f"{option.replace('=', ' ')}.*: both are at least 1"):
        shared.load_passages(shared.parser("").parse_args([option]))


def test_a_loss_of_half_precision_has_all_its_digits(shared):
    logits = torch.randn(1, 64, 96, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(64)[None]
    right = shared.summed_cross_entropy(logits.bfloat16().double(), targets)
    found = shared.summed_cross_entropy(logits.bfloat16(), targets)
    assert found.item() == pytest.approx(right.item(), rel=1e-5)


def test_weights_that_are_stored_in_half_precision_are_trained_in_full(shared, tmp_path):
    options = shared.parser("").parse_args([])
    shared.load_model(options).bfloat16().save_pretrained(tmp_path)
    options.model = tmp_path
    for model in shared.load_model(options), shared.without_weights(options):
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_trainer_does_not_take_several_gpus_by_itself(monkeypatch, with_accelerate):
    """It would use nn.DataParallel, of a batch for each."""
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.syspath_prepend(ACCELERATE)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["trainer.py"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    import trainer

    with pytest.raises(SystemExit, match=r"by nn\.DataParallel: start it with torchrun"):
        trainer.main()


def test_without_a_launcher_it_says_how_to_start(tmp_path):
    command = [sys.executable, RECIPES / "ddp.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "no rank: start it with torchrun --standalone --nproc-per-node RANKS SCRIPT\n"
    )


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    """Asked as of the third rank of a node of two GPUs."""
    monkeypatch.syspath_prepend(RECIPES)
    import model_and_data

    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SystemExit, match="no GPU for local rank 2: start no more than 2 ranks"):
        model_and_data.join()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@needs_accelerate
def test_the_trainer_has_the_losses_of_one_process(tmp_path, single, with_accelerate, ranks):
    done = with_accelerate(ranks, "trainer.py", *STEPS, folder=tmp_path)
    assert losses(done) == pytest.approx(single, abs=5e-6)


@needs_accelerate
def test_ranks_of_the_trainer_draw_different_dropout_masks(masks, with_accelerate):
    first, second = masks(with_accelerate, 2, "trainer.py")["whole"]
    assert not {*first} & {*second}


def test_each_recipe_is_started_by_torchrun():
    """By the chapter, which compares its losses with those of one process, or here."""
    chapter = (ROOT / "notebooks/en/17_from_one_to_many.ipynb").read_text()
    started = re.findall(r'train\(\\"(\w+\.py)\\", \d', chapter)
    resumed = "torchrun --standalone --nproc-per-node 2 {TRAIN} --resume"
    assert resumed in (ROOT / "notebooks/en/18_deepspeed.ipynb").read_text()
    others = {"single.py", "model_and_data.py", "saving.py", "faults.py", "deepspeed_resume.py"}
    assert {*started, *STARTED_HERE} == {*SCRIPTS} - others


@pytest.mark.parametrize("script, fewer", [("fsdp.py", 1), ("deepspeed_zero.py", 2)])
def test_a_saved_state_goes_on(tmp_path, single, forked, script, fewer):
    """In each step the loss of a run that was never cut; FSDP's also on fewer ranks."""
    save = [*STEPS, "--save", tmp_path / "state"]
    before = losses(forked(2, script, *save, "--steps", 2, folder=tmp_path))
    after = losses(forked(fewer, script, *save, "--resume", folder=tmp_path))
    assert (list(before), list(after)) == ([0, 1], [2])
    assert before | after == pytest.approx(single, abs=5e-6)


KILLED = """
import os, runpy, sys
import torch.distributed.checkpoint as dcp
save = dcp.save

def killed(*arguments, **keywords):
    save(*arguments, **keywords)
    os._exit(1)

dcp.save = killed
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_save_that_is_killed_leaves_the_state_that_was_there(tmp_path, single, forked):
    """All shards are written, and no rank gets further."""
    save = [*STEPS, "--save", tmp_path / "state"]
    losses(forked(2, "fsdp.py", *save, "--steps", 1, folder=tmp_path))
    (tmp_path / "killed.py").write_text(KILLED)
    more = [*save, "--resume", "--steps", 2]
    done = forked(2, tmp_path / "killed.py", RECIPES / "fsdp.py", *more, folder=tmp_path)
    assert done.returncode != 0 and "step 1: loss" in done.stdout
    assert (tmp_path / "state.new").is_dir()
    after = losses(forked(2, "fsdp.py", *save, "--resume", folder=tmp_path))
    assert after == pytest.approx({step: single[step] for step in (1, 2)}, abs=5e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.py", "state"]


def test_deepspeed_says_that_there_is_nothing_to_resume(tmp_path, forked):
    more = ["--save", tmp_path / "state", "--resume"]
    done = forked(1, "deepspeed_zero.py", *STEPS, *more, folder=tmp_path)
    assert done.returncode != 0 and f"no checkpoint in {tmp_path / 'state'}" in done.stderr


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_goes_on_after_a_crash(tmp_path, forked, stage):
    """The losses of a run without a crash, to the last digit that is printed."""
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def run(folder, *options):
        more = ["--deepspeed_config", "config.json", "--save", folder, *options]
        done = forked(2, "deepspeed_resume.py", *more, folder=tmp_path)
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


def test_the_readme_has_the_versions_that_are_tested():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = [one for one in extra["book"] if re.match("transformers|datasets|deepspeed", one)]
    readme = (RECIPES / "README.md").read_text()
    assert all(f'"{one}"' in readme for one in [*needed, "torch>=2.11"]), needed


def test_trained_weights_are_not_trained_at_the_rate_of_random_ones():
    for path in (RECIPES / "README.md", RECIPES / "single.py"):
        assert re.findall(r"--model gpt2.*--lr 3e-5", path.read_text()), path


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


def test_the_job_script_takes_no_port_of_outgoing_connections():
    """On Linux these begin at 32768, unless an administrator has changed it."""
    port = r"\$\(\((\d+) \+ SLURM_JOB_ID % (\d+)\)\)"
    pages = ROOT.glob("notebooks/*/17_from_one_to_many.ipynb")
    for path in (RECIPES / "slurm.sbatch", *pages):
        [(first, count)] = re.findall(port, path.read_text())
        assert 1024 <= int(first) < int(first) + int(count) <= 32768, path
