"""Recipes that go on with a saved state, or say in words why they cannot."""

import gzip
import json
import shutil

import pytest
from started import RECIPES, STEPS, losses

pytestmark = pytest.mark.slow

SAVING = ["fsdp.py", "deepspeed_zero.py"]
CONFIG = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
# Each rank has a folder of its own, as nodes have that share no file system.
ON_NODES = """
import os, runpy, sys

os.chdir(f"node{os.environ['RANK']}")
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def on_nodes(tmp_path, forked):
    """`on_nodes(script, *options)`: as `forked`, on two ranks in tmp_path/node0 and node1."""
    (tmp_path / "on_nodes.py").write_text(ON_NODES)
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()

    def start(script, *options):
        program = [tmp_path / "on_nodes.py", RECIPES / script]
        return forked(2, *program, *options, folder=tmp_path)

    return start


@pytest.fixture(scope="module")
def saved(tmp_path_factory, forked):
    """{script: a folder with `state`, saved by two ranks after one step}."""
    found = {}
    for script in SAVING:
        found[script] = tmp_path_factory.mktemp(script.partition(".")[0])
        save = ["--steps", "1", "--save", "state"]
        losses(forked(2, script, *STEPS, *save, folder=found[script]))
    return found


@pytest.fixture
def resume(saved, forked):
    """`resume(script, *options, ranks=2)`: go on in the folder, and save nothing new."""

    def start(script, *options, ranks=2):
        more = ["--save", "state", "--resume", *options]
        return forked(ranks, script, *STEPS, *more, folder=saved[script])

    return start


@pytest.mark.parametrize("script", SAVING)
def test_a_folder_that_nodes_do_not_share_is_refused_before_the_first_step(on_nodes, script):
    done = on_nodes(script, *STEPS, "--save", "state")
    assert done.returncode != 0
    assert "--save needs a folder on a file system that all nodes share: rank 1" in done.stderr
    assert "loss" not in done.stdout


def test_deepspeed_resumes_on_all_nodes_or_on_none(tmp_path, forked, on_nodes):
    """Of a folder on each node, the first has the file `latest`; the other would begin anew."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ["--deepspeed_config", tmp_path / "config.json", "--save", "state"]
    losses(forked(2, "deepspeed_resume.py", *options, "--steps", "4", folder=tmp_path))
    for rank in range(2):
        shutil.copytree(tmp_path / "state", tmp_path / f"node{rank}" / "state")
    (tmp_path / "node1" / "state" / "latest").unlink()
    done = on_nodes("deepspeed_resume.py", *options)
    assert done.returncode != 0
    words = "--save has to be a folder that all nodes share: the ranks see ['global_step4', 'none']"
    assert words in done.stderr
    assert "loss" not in done.stdout


def test_deepspeed_resumes_by_itself(tmp_path, forked):
    """Started by a scheduler again, with the same command."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = ["deepspeed_resume.py", "--deepspeed_config", "config.json", "--save", "state"]
    assert list(losses(forked(2, *command, "--steps", "4", folder=tmp_path))) == [0, 1, 2, 3]
    assert list(losses(forked(2, *command, "--steps", "6", folder=tmp_path))) == [4, 5]
    done = forked(2, *command, "--steps", "6", folder=tmp_path)
    assert losses(done) == {} and done.stdout.count("already at step 6") == 1


@pytest.mark.parametrize(
    "script, name, before, now",
    [
        *((script, "--batch", 8, 4) for script in SAVING),
        *((script, "--seed", 0, 1) for script in SAVING),
        *((script, "--optimizer", "sgd", "adamw") for script in SAVING),
        ("deepspeed_zero.py", "--stage", 3, 2),
    ],
)
def test_what_must_not_change_is_refused(resume, script, name, before, now):
    """Another batch or seed would skip rows, or read them twice."""
    done = resume(script, name, now)
    assert done.returncode != 0
    assert f"was saved with {name} {before}, and this is {name} {now}" in done.stderr
    assert "loss" not in done.stdout


def test_deepspeed_says_that_it_was_another_number_of_ranks(resume):
    done = resume("deepspeed_zero.py", ranks=1)
    assert done.returncode != 0
    assert "was saved with WORLD_SIZE 2, and this is WORLD_SIZE 1" in done.stderr


def test_deepspeed_says_that_it_was_another_precision(resume):
    """Its shards are then in files of other names."""
    done = resume("deepspeed_zero.py", "--bf16")
    assert done.returncode != 0
    assert "was saved with --bf16 False, and this is --bf16 True" in done.stderr


@pytest.mark.parametrize("script", SAVING)
def test_a_new_learning_rate_holds(tmp_path, forked, saved, single, script):
    """Without one, the rate that was saved."""
    options = ["--steps", "3", "--optimizer", "sgd", "--save", "state", "--resume"]
    for name, new in (("saved", []), ("new", ["--lr", "0.2"])):
        shutil.copytree(saved[script], tmp_path / name)
        after = losses(forked(2, script, *options, *new, folder=tmp_path / name))
        assert after[1] == pytest.approx(single[1], abs=5e-6), "before the first new update"
        far = abs(after[2] - single[2])
        assert far > 1e-3 if new else far < 5e-6, name


@pytest.mark.parametrize("script", SAVING)
def test_nothing_left_to_do(saved, resume, script):
    written = files(saved[script])
    done = resume(script, "--steps", "1")
    assert losses(done) == {} and done.stdout.count("already at step 1") == 1
    assert files(saved[script]) == written


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("script", SAVING)
def test_resume_needs_save(tmp_path, forked, script):
    done = forked(1, script, *STEPS, "--resume", folder=tmp_path)
    assert done.returncode == 2
    assert "--resume needs --save, the folder of the state to begin with" in done.stderr


@pytest.mark.parametrize("left", ["old", "new", "both", "half"])
def test_a_save_that_is_killed_between_its_renames(tmp_path, forked, saved, single, left):
    """The new state goes on if it is whole, else the old one."""
    state, new, old = (tmp_path / name for name in ("state", "state.new", "state.old"))
    shutil.copytree(saved["fsdp.py"] / "state", old)
    if left in ("new", "both"):
        shutil.copytree(old, state)
        losses(forked(2, "fsdp.py", *STEPS, *resumed(2), folder=tmp_path))
        state.rename(new)
    if left == "both":
        shutil.copytree(saved["fsdp.py"] / "state", old)
    if left == "half":
        new.mkdir()
        (new / "__0_0.distcp").touch()
    after = losses(forked(1, "fsdp.py", *STEPS, *resumed(3), folder=tmp_path))
    first = 2 if left in ("new", "both") else 1
    assert after == pytest.approx({step: single[step] for step in range(first, 3)}, abs=5e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def resumed(steps):
    return ["--save", "state", "--resume", "--steps", steps]


def test_fsdp_says_that_there_is_nothing_to_resume(tmp_path, forked):
    done = forked(2, "fsdp.py", *STEPS, *resumed(3), folder=tmp_path)
    assert done.returncode != 0 and "no checkpoint in state\n" in done.stderr


def test_a_folder_may_end_with_a_slash(tmp_path, forked):
    losses(forked(1, "fsdp.py", *STEPS, "--steps", "1", "--save", "state/", folder=tmp_path))
    assert (tmp_path / "state" / ".metadata").exists()


@pytest.mark.parametrize("script", SAVING)
def test_a_new_run_takes_no_other_runs_place(saved, forked, script):
    """It is refused before the first step, and not when there is something to save."""
    written = files(saved[script])
    done = forked(2, script, *STEPS, "--save", "state", folder=saved[script])
    assert done.returncode != 0 and "loss" not in done.stdout
    said = "state is not empty: --resume goes on with its state; begin in another folder\n"
    assert said in done.stderr
    assert files(saved[script]) == written


REDUCED = """
import os, runpy, sys
import torch.distributed as dist
reduce = dist.reduce_scatter_single

def reported(**keywords):
    sys.stdout.write(f"reduced in {keywords['output'].dtype}\\n")
    return reduce(**keywords)

dist.reduce_scatter_single = reported
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_gradients_of_bfloat16_are_summed_in_fp32(tmp_path, forked):
    (tmp_path / "reduced.py").write_text(REDUCED)
    program = [tmp_path / "reduced.py", RECIPES / "fsdp.py"]
    done = forked(2, *program, *STEPS, "--bf16", "--steps", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    reduced = {line for line in done.stdout.splitlines() if line.startswith("reduced")}
    assert reduced == {"reduced in torch.float32"}


def test_a_link_to_a_folder_elsewhere_is_followed(tmp_path, forked, single):
    """Of a home to a scratch file system: the state cannot take the link's place."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "state").symlink_to("scratch")
    for steps, more in (("1", []), ("3", ["--resume"])):
        options = ["--steps", steps, "--save", "state", *more, "--optimizer", "sgd", "--lr", "0.1"]
        found = losses(forked(2, "fsdp.py", *options, folder=tmp_path))
    assert found == pytest.approx({step: single[step] for step in (1, 2)}, abs=5e-6)
    assert (tmp_path / "state").is_symlink() and (tmp_path / "scratch" / ".metadata").exists()


@pytest.mark.parametrize("script", SAVING)
def test_other_data_are_refused(tmp_path, resume, script):
    """The next step would not read the next rows."""
    with gzip.open(RECIPES / "small" / "text" / "train.jsonl.gz", "rt") as packed:
        rows = packed.read().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(reversed(rows)))
    done = resume(script, "--data", str(tmp_path))
    assert done.returncode != 0
    assert "was saved with texts in --data " in done.stderr
    assert "loss" not in done.stdout


def test_what_else_is_in_the_folder_stays(tmp_path, forked):
    save = [*STEPS, "--save", "state"]
    losses(forked(2, "fsdp.py", *save, "--steps", "1", folder=tmp_path))
    (tmp_path / "state" / "notes.txt").write_text("mine")
    losses(forked(2, "fsdp.py", *save, "--steps", "2", "--resume", folder=tmp_path))
    assert (tmp_path / "state" / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    done = forked(2, "fsdp.py", *STEPS, "--save", ".", folder=tmp_path)
    assert "--save . cannot be replaced as a whole: name a folder in it" in done.stderr


def test_what_a_killed_save_had_not_taken_over_yet_comes_back(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(RECIPES)
    import saving

    monkeypatch.setattr(saving.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(saving.dist, "barrier", lambda: None)
    folder, old = tmp_path / "state", tmp_path / "state.old"
    for path in folder, old:
        path.mkdir()
        (path / ".metadata").touch()
    (old / "notes.txt").write_text("mine")
    (old / "log").write_text("old")
    (folder / "log").write_text("new")
    saving.finish_save(folder)
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "log").read_text() == "new"
