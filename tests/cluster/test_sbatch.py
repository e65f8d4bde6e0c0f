"""``sbatch book/execute.sbatch``: executed in an allocation, left where make finds them."""

import json
import shutil
import time

import nbformat
import pytest
from test_launchers import ROOT, batch, ranks, run, wait_until_no_ranks

CELLS = [
    "import naranhi\nworld = naranhi.World(2)",
    "%%ranks\nimport os\nx = torch.ones(1)\ndist.all_reduce(x)\n"
    "print(x.item(), 'SLURM_PROCID' in os.environ)",
    "world.close()",
    "import os\nprint(os.environ['SLURM_JOB_CPUS_PER_NODE'], os.environ['SLURM_JOB_NUM_NODES'])",
]


@pytest.fixture
def project(tmp_path):
    """A book of one notebook, with this project's builder and environment."""
    for folder in ("en", "ko"):
        (tmp_path / "notebooks" / folder).mkdir(parents=True)
    for name in ("book", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("requirements.txt", "_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    write(tmp_path, CELLS)
    return tmp_path


def write(project, cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbformat.write(notebook, project / "notebooks" / "en" / "tiny.ipynb")


def test_notebooks_executed_in_an_allocation(slurm, project):
    script = ROOT / "book" / "execute.sbatch"
    printed = batch(slurm, script, project, tasks=())
    executed = project / "_build" / "executed" / "tiny.ipynb"
    assert "Executed notebooks:" in printed, printed
    outputs = [c["outputs"] for c in json.loads(executed.read_text())["cells"]]
    assert outputs[1][0]["text"] == ["[ranks 0-1] 2.0 True\n"]
    assert outputs[3][0]["text"] == ["4 1\n"], "a core for each rank, on one node"

    good = executed.read_bytes()
    write(project, [*CELLS[:2], "1 / 0"])
    printed = batch(slurm, script, project, tasks=())
    assert "ZeroDivisionError" in printed
    assert executed.read_bytes() == good


def test_an_execution_that_is_cancelled_leaves_nothing(slurm, project):
    """And the next one finds the folder free, though the killed one could not say a word."""
    write(project, [*CELLS[:2], "%%ranks\nimport time\ntime.sleep(600)"])
    script, output = ROOT / "book" / "execute.sbatch", project / "output"
    command = ["sbatch", "--parsable", f"--chdir={project}", f"--output={output}", script]
    job = run(command, env=slurm).strip()
    end = time.monotonic() + 120
    while not ranks():
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.3)
    run(["scancel", job], env=slurm)
    end = time.monotonic() + 60
    while run(["squeue", "--noheader", f"--jobs={job}", "--states=PD,R,CG"], env=slurm).strip():
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.3)
    wait_until_no_ranks()
    assert not (project / "_build" / "executed").exists()

    write(project, CELLS)
    printed = batch(slurm, script, project, tasks=())
    assert "Executed notebooks:" in printed, printed
