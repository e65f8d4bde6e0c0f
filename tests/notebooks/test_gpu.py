"""`make gpu` without a GPU: its preflight, how steps end, and how records are taken up."""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import nbformat
import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "book"))

import gpu  # noqa: E402
import localize  # noqa: E402
import records  # noqa: E402
from execution import digest  # noqa: E402

FINE = {
    "python": "3.12.3",
    "missing": [],
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "error": None,
    "gpus": ["NVIDIA H100 80GB HBM3"],
    "smi": [["NVIDIA H100 80GB HBM3", "81559", "81000", "580.159.04"]],
    "driver": "580.159.04",
    "others": [],
    "free": 80 * 2**30,
    "nccl": "2.28.9",
    "rehearse": False,
}


def without(name):
    return {key: value for key, value in FINE.items() if key != name}


# --- the preflight -------------------------------------------------------------------------------


def test_nothing_is_wrong_with_a_machine_that_has_everything():
    assert gpu.problems(FINE) == []


@pytest.mark.parametrize(
    "facts, words",
    [
        ({**FINE, "smi": [], "gpus": []}, "no GPU: nvidia-smi is missing, lists none or does not"),
        ({**FINE, "cuda": None, "gpus": []}, "is built without CUDA; name a Python"),
        (
            {**FINE, "gpus": [], "error": "The NVIDIA driver on your system is too old"},
            "cannot use the GPU with driver 580.159.04: The NVIDIA driver on your system is too",
        ),
        ({**FINE, "gpus": []}, "no GPU is visible (CUDA_VISIBLE_DEVICES?)"),
        (without("nccl"), "is built without NCCL"),
        ({**FINE, "nccl": "2.9.9"}, "NCCL is 2.9.9; the book needs 2.10 or later"),
        ({**FINE, "free": 3 * 2**30}, "a GPU has 3.0 GiB of free memory, and 8 are needed"),
        ({**FINE, "others": ["17", "18"]}, "other processes use the GPU (process 17, 18)"),
        ({**FINE, "missing": ["ipyparallel"]}, "-d wheels ipyparallel, carry"),
        ({**FINE, "torch": "2.10.0"}, "torch is 2.10.0; the book runs on 2.11 to 2.13"),
        ({**FINE, "torch": "2.14.0"}, "torch is 2.14.0"),
        ({**FINE, "torch": None}, "torch is not installed for this Python"),
    ],
)
def test_what_stands_in_the_way_is_named(facts, words):
    [problem] = gpu.problems(facts)
    assert words in problem


def test_the_preflight_knows_what_the_package_needs():
    """Each dependency of the package is asked for, or comes with one that is."""

    def with_what_they_need(names):
        known, left = set(), list(names)
        while left:
            name = re.sub(r"[-_.]+", "-", left.pop()).lower()
            if name not in known:
                known.add(name)
                try:
                    needed = importlib.metadata.requires(name) or []
                except importlib.metadata.PackageNotFoundError:
                    continue
                needed = [one for one in needed if "extra ==" not in one]
                left += [re.match(r"[\w.-]+", one)[0] for one in needed]
        return known

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}
    assert needed <= with_what_they_need(["torch", *gpu.PACKAGES.values()])


def test_all_problems_are_named_at_once():
    facts = {**without("nccl"), "missing": ["xdist"], "free": 0, "others": ["1"]}
    assert len(gpu.problems(facts)) == 4


def test_without_a_gpu_nothing_else_is_asked_for():
    """Packages and torch are not worth installing for it."""
    facts = {**FINE, "smi": [], "gpus": [], "torch": None, "missing": ["ipykernel"]}
    [problem] = gpu.problems(facts)
    assert problem.startswith("no GPU")


def test_without_a_gpu_torch_is_not_imported(monkeypatch):
    monkeypatch.setattr(gpu, "_smi", lambda fields, kind: [])
    assert gpu.machine(rehearse=False)["torch"] is None
    assert gpu.machine(rehearse=True)["torch"] == torch.__version__


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    command = [sys.executable, ROOT / "book/gpu.py", "--into", tmp_path / "new"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("make gpu: no GPU: nvidia-smi is missing, lists none or does ")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        (["--minutes", "0"], "--minutes 0: there has to be time"),
        (["--minutes", "nan"], "--minutes nan: there has to be time"),
        (
            ["--only", "04_overlap", "4_overlap"],
            "no step is called 4_overlap, only tests, one_gpu, 04_overlap, 01",
        ),
    ],
)
def test_wrong_options_are_refused_before_a_record_is_touched(options, words, tmp_path):
    command = [sys.executable, ROOT / "book/gpu.py", "--rehearse", "--into", tmp_path / "new"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "gpus, name",
    [
        (["NVIDIA H100 80GB HBM3"], "h100"),
        (["NVIDIA A100-SXM4-80GB"] * 8, "8xa100-sxm4-80gb"),
        (["NVIDIA GeForce RTX 4090"], "rtx-4090"),
        (["NVIDIA H200"], "h200"),
        ([], "cpu"),
    ],
)
def test_a_machine_is_named_after_its_gpus(gpus, name, tmp_path):
    assert gpu.name_of({"gpus": gpus, "cores": 2}, tmp_path) == name


def test_another_board_has_a_folder_of_its_own(tmp_path):
    records.write(tmp_path / "h100", "stamp.json", {"device": "1 × NVIDIA H100 80GB HBM3"})
    assert gpu.name_of({"gpus": ["NVIDIA H100 80GB HBM3"]}, tmp_path) == "h100"
    assert gpu.name_of({"gpus": ["NVIDIA H100 PCIe"]}, tmp_path) == "h100-pcie"
    assert gpu.name_of({"gpus": 2 * ["NVIDIA H100 PCIe"]}, tmp_path) == "2xh100"


# --- the steps -----------------------------------------------------------------------------------


def test_each_step_is_written_when_it_ends_and_the_time_is_kept(tmp_path):
    """One passes, one fails, one is stopped with what it has started, one finds no time left."""
    steps = gpu.Steps(tmp_path, {"name": "cpu", "commit": "abc1234", "steps": []}, 4.0)
    python = [sys.executable, "-c"]

    def written():
        return json.loads((tmp_path / "stamp.json").read_text())["steps"]

    steps.run("fine", [*python, f"print('at {ROOT}/book')"], 0.1)
    assert [entry["result"] for entry in written()] == ["passed"]
    assert (tmp_path / "fine.log").read_text() == "at ./book\n"
    steps.run("wrong", [*python, "1 / 0"], 0.1)
    assert "ZeroDivisionError" in (tmp_path / "wrong.log").read_text()
    child = "import subprocess; subprocess.run(['sleep', '61.5'])"
    start = time.monotonic()
    steps.run("long", [*python, child], 0.1)
    assert time.monotonic() - start < 6
    assert not [p for p in psutil.process_iter(["cmdline"]) if "61.5" in (p.info["cmdline"] or [])]
    steps.run("late", [*python, "pass"], 0.1)
    assert [entry["result"] for entry in written()] == [
        "passed",
        "failed",
        "stopped: the time was over",
        "not run: no time was left",
    ]


@pytest.mark.parametrize("home, said", [("/", "at /a/b"), ("/a", "at ~/b"), (None, "at /a/b")])
def test_a_log_names_no_home(tmp_path, monkeypatch, home, said):
    """In a container under any user it may be the root, or unknown."""
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    steps = gpu.Steps(tmp_path, {"name": "cpu", "commit": "abc1234", "steps": []}, 4.0)
    steps.run("one", [sys.executable, "-c", "print('at /a/b')"], 0.1)
    assert (tmp_path / "one.log").read_text() == f"{said}\n"


BEFORE = [
    {"step": "a", "result": "passed", "seconds": 1, "commit": "abc1234"},
    {"step": "b", "result": "passed", "seconds": 1, "commit": "0ther00"},
    {"step": "c", "result": "failed", "seconds": 1, "commit": "abc1234"},
]


@pytest.mark.parametrize("commit, again", [("abc1234", "bc"), ("abc1234+", "abc")])
def test_a_resumed_run_leaves_out_what_passed_at_its_commit(tmp_path, commit, again):
    """Not at one with changes since, which may be others."""
    stamp = {"device": "1 × NVIDIA H100", "torch": "2.13.0", "commit": commit}
    assert gpu.before(tmp_path, stamp, ["a", "b", "c"], True) == []
    earlier = [{**step, "commit": step["commit"].replace("abc1234", commit)} for step in BEFORE]
    records.write(tmp_path, "stamp.json", {**stamp, "steps": earlier})
    kept = gpu.before(tmp_path, stamp, ["a", "b", "c"], True)
    steps = gpu.Steps(tmp_path, {**stamp, "steps": kept}, 60.0)
    for name in "abc":
        steps.run(name, [sys.executable, "-c", f"open({str(tmp_path / name)!r}, 'w')"], 0.1)
    assert [name for name in "abc" if (tmp_path / name).exists()] == list(again)
    written = json.loads((tmp_path / "stamp.json").read_text())["steps"]
    assert [(step["step"], step["commit"]) for step in written] == [
        (name, commit) for name in "abc"
    ]


def test_what_is_not_run_now_stays_in_the_stamp(tmp_path):
    """As it ended, passed or not; unless it was of another torch, or of another device."""
    stamp = {"device": "1 × NVIDIA H100", "torch": "2.13.0", "commit": "new0000"}
    records.write(tmp_path, "stamp.json", {**stamp, "steps": BEFORE})
    assert gpu.before(tmp_path, stamp, ["a"], False) == BEFORE[1:]
    assert gpu.before(tmp_path, {**stamp, "torch": "2.12.0"}, ["a"], False) == []
    assert gpu.before(tmp_path, {**stamp, "device": "1 × NVIDIA H200"}, ["a"], False) == []


def test_a_step_that_passed_before_stays_where_no_time_is_left(tmp_path):
    """Its record is still there, and shown."""
    passed = {"step": "a", "result": "passed", "seconds": 1, "commit": "0ther00"}
    steps = gpu.Steps(tmp_path, {"commit": "abc1234", "steps": [passed]}, 0.0)
    steps.run("a", [sys.executable, "-c", "pass"], 0.1)
    assert json.loads((tmp_path / "stamp.json").read_text())["steps"] == [passed]


def test_a_step_keeps_others_out_after_its_run_was_killed(tmp_path):
    with gpu.alone(tmp_path) as lock:
        steps = gpu.Steps(tmp_path, {"commit": None, "steps": []}, 60.0, lock)
        program = "import os, time; print(os.getpid(), flush=True); time.sleep(61.8)"
        threading.Thread(
            target=steps.run, args=("a", [sys.executable, "-c", program], 0.1), daemon=True
        ).start()
        log = tmp_path / "a.log"
        while not (log.exists() and log.read_text().endswith("\n")):
            time.sleep(0.05)
    try:  # as if the process were gone, whose lock ends here
        with pytest.raises(gpu.CannotBuild, match="is in use"), gpu.alone(tmp_path):
            pass
    finally:
        os.kill(int(log.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("into, why", [("file/new", "Not a directory"), ("damaged", "Expecting")])
def test_a_folder_that_cannot_be_used_is_named(tmp_path, into, why):
    (tmp_path / "file").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "stamp.json").write_text('{"device":')
    command = [sys.executable, ROOT / "book/gpu.py", "--rehearse", "--only", "bench"]
    done = subprocess.run(
        [*command, "--into", tmp_path / into, "--minutes", "0.01"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"make gpu: {tmp_path / into} cannot be used: " in done.stderr and why in done.stderr


def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path, monkeypatch):
    hung = tmp_path / "nvidia-smi"
    hung.write_text("#!/bin/sh\nexec sleep 61.9\n")
    hung.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu, "ANSWERS", 0.3)
    assert gpu.machine(rehearse=False)["smi"] == []


BESIDE = """
import sys
sys.path.insert(0, {book!r})
import gpu
gpu.stop_when_lost()
gpu._execute = lambda steps, name, jobs: steps.run(name, ["sleep", "61.7"], 0.1)
steps = gpu.Steps(gpu.Path({folder!r}), {{"commit": None, "steps": []}}, 60.0)
print("started", flush=True)
gpu._beside(steps, ["a", "b", "c"], 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_no_chapter_running(tmp_path, number):
    program = BESIDE.format(book=str(ROOT / "book"), folder=str(tmp_path))
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "started\n"
    while len(psutil.Process(run.pid).children()) < 2:
        time.sleep(0.05)
    run.send_signal(number)
    assert run.wait(20) != 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if "61.7" in (p.info["cmdline"] or [])]
    steps = json.loads((tmp_path / "stamp.json").read_text())["steps"]
    assert {step["result"] for step in steps} == {"stopped: interrupted"}


def options(**changed):
    return argparse.Namespace(**{"minutes": 1e-3, "rehearse": True, **changed})


def test_a_run_of_which_nothing_passed_says_so(tmp_path, capsys):
    stamp = {"commit": None, "steps": []}
    facts = {"gpus": [], "cores": 2}
    assert gpu.record(tmp_path, stamp, ["one_gpu"], options(), facts) == 1
    assert stamp["steps"][0]["result"] == "not run: no time was left"
    assert "no step passed" in capsys.readouterr().err


@pytest.mark.parametrize("gpus, cores, width", [(1, 16, 3), (1, 4, 1), (0, 10, 2), (8, 192, 1)])
def test_chapters_beside_each_other_are_told_so(tmp_path, monkeypatch, gpus, cores, width):
    """So that the next build executes them again; on several GPUs each is alone."""
    ran = {}
    monkeypatch.setattr(
        gpu.Steps, "run", lambda self, name, command, least: ran.update({name: command})
    )
    facts = {"gpus": gpus * ["NVIDIA H100 PCIe"], "cores": cores}
    wanted = ["04_overlap", "05_inter_layer", "06_gpipe"]
    gpu.record(tmp_path, {"commit": None, "steps": []}, wanted, options(), facts)
    jobs = {name: command[command.index("--jobs") + 1] for name, command in ran.items()}
    assert jobs == dict(zip(wanted, ["1", str(width), str(width)], strict=True))


def test_a_chapter_without_its_packages_is_named(tmp_path, monkeypatch):
    """By what its code imports; prose may cite a package, or tell of it."""
    monkeypatch.setattr(gpu, "OPTIONAL", ("no_such_package", "deepspeed"))
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.Steps, "run", lambda self, name, *_: self._note(name, "passed", 1))
    (tmp_path / "notebooks/en").mkdir(parents=True)
    for name, kind in ("01_one", "code"), ("02_two", "markdown"):
        cell = {"cell_type": kind, "source": ["x = 1\n", "import no_such_package, deepspeed"]}
        (tmp_path / f"notebooks/en/{name}.ipynb").write_text(json.dumps({"cells": [cell]}))
    steps = gpu.Steps(tmp_path, {"name": "cpu", "commit": "abc1234", "steps": []}, 60.0)
    for name in "01_one", "02_two":
        gpu._execute(steps, name)
    entries = json.loads((tmp_path / "stamp.json").read_text())["steps"]
    assert [entry["result"] for entry in entries] == ["not run: it needs no_such_package", "passed"]


def test_the_files_with_marked_tests_are_found():
    marked = {path.name for path in ROOT.glob("tests/*/test_*.py") if gpu._is_marked(path)}
    assert marked >= {"test_kernels.py", "test_one_gpu.py", "test_streams.py"}


def test_the_most_telling_chapters_come_first():
    names = gpu.chapters()
    assert names[0] == "04_overlap"
    assert sorted(names) == sorted(path.stem for path in (ROOT / "notebooks/en").glob("*.ipynb"))
    assert gpu.steps_in_order() == ["tests", "one_gpu", *names, "bench"]


# --- records -------------------------------------------------------------------------------------


PACKAGE = "[ranks 0-3] /a/site-packages/b.py:2: UserWarning: see http://c\n[ranks 0-3]   import d\n"


def chapter(seconds, svg):
    """A chapter with its outputs: a text, a measured figure, a computed one, a folded answer."""

    def figure(html, measured):
        data = {"text/html": html, "text/plain": "[figure: a line]"}
        metadata = {"naranhi": {"measured": measured}}
        return nbformat.v4.new_output("display_data", data, metadata=metadata)

    def cell(id, *outputs, **metadata):
        return nbformat.v4.new_code_cell(f"{id}()", id=id, outputs=list(outputs), metadata=metadata)

    def text(words):
        return nbformat.v4.new_output("stream", name="stdout", text=words)

    notebook = nbformat.v4.new_notebook(
        cells=[
            cell("same", text("✓ equal\n")),
            cell("time", text(f"{PACKAGE}took {seconds} s\n")),
            cell("measured", figure(f"<svg>{svg}</svg>", True)),
            cell("computed", figure(f"<svg>computed on {svg}</svg>", False)),
            cell("answer", text(f"{seconds}\n"), tags=["hide-cell"]),
        ]
    )
    facts = {"date": "2026-11-22", "commit": "abc1234", "seconds": 9, "backends": ["gloo"]}
    facts["device"] = "cpu"
    notebook.metadata["naranhi"] = {"executed": facts, "key": {"modules": {}}}
    return notebook


@pytest.fixture
def root(tmp_path):
    """A project with a record of its chapter 01_one, made on the CPU."""
    for folder in ("notebooks/en", "src/naranhi"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "requirements.txt").write_text("")
    folder = tmp_path / records.FOLDER / "cpu"
    records.write(folder, "01_one.json", records.reduce(chapter(2, "theirs")))
    facts = {"device": "4 × CPU", "torch": "2.12.0", "date": "2026-11-23", "steps": []}
    records.write(folder, "stamp.json", {"name": "cpu", **facts})
    return tmp_path


def taken_up(root, notebook):
    """What is folded below each cell's outputs; and the stamp."""
    sources = [cell.source for cell in notebook.cells]
    records.take_up(notebook, "01_one", root, "On {device}, {date}")
    assert [cell.source for cell in notebook.cells] == sources  # the download is as written
    folded = {}
    for cell in notebook.cells:
        html = "".join(output.get("data", {}).get("text/html", "") for output in cell.outputs)
        if "<details" in html:
            folded[cell.id] = html.partition('<details class="naranhi-record">')[2]
    return folded, notebook.metadata["naranhi"]["recorded"]


def test_a_chapter_shows_what_was_different_there(root):
    notebook = chapter(1, "ours")
    folded, [stamp] = taken_up(root, notebook)
    assert folded == {
        "time": "<summary>On 4 × CPU, 2026-11-22</summary><pre>took 2 s</pre></details>",
        "measured": "<summary>On 4 × CPU, 2026-11-22</summary><svg>theirs</svg></details>",
    }
    assert [len(cell.outputs) for cell in notebook.cells] == [1, 2, 1, 1, 1]
    assert notebook.cells[2].outputs[0].data["text/html"].startswith("<svg>ours</svg><details")
    assert stamp["changed"] == {"cells": 0, "package": False}
    assert stamp["commit"] == "abc1234"


def test_a_record_without_a_commit_names_none(root):
    """Of a copy without git."""
    path = root / records.FOLDER / "cpu/01_one.json"
    content = json.loads(path.read_text())
    content["executed"]["commit"] = None
    path.write_text(json.dumps(content))
    notebook = chapter(1, "ours")
    records.take_up(notebook, "01_one", root, "On {device} ({date}, torch {torch}, {commit})")
    assert "<summary>On 4 × CPU (2026-11-22, torch 2.12.0)</summary>" in str(notebook.cells)


def test_a_table_that_is_the_same_there_is_not_repeated(root):
    """Also where its record has the text only."""
    path = root / records.FOLDER / "cpu/01_one.json"
    kept = json.loads(path.read_text())
    kept["cells"]["computed"] = {"source": digest("computed()"), "outputs": [{"text": "a line"}]}
    path.write_text(json.dumps(kept))
    notebook = chapter(1, "ours")
    notebook.cells[3].outputs[0].data["text/plain"] = "a line\n"
    assert "computed" not in taken_up(root, notebook)[0]


def test_lines_that_came_in_two_parts_there_are_not_repeated(root):
    path = root / records.FOLDER / "cpu/01_one.json"
    kept = json.loads(path.read_text())
    kept["cells"]["same"]["outputs"] = [{"text": "✓ equal\n"}, {"text": "✓ to the bit\n"}]
    path.write_text(json.dumps(kept))
    notebook = chapter(1, "ours")
    assert "to the bit" in taken_up(root, notebook)[0]["same"]
    notebook = chapter(1, "ours")
    notebook.cells[0].outputs[0].text += "✓ to the bit\n"
    assert "same" not in taken_up(root, notebook)[0]


def test_a_record_goes_stale_visibly(root):
    notebook = chapter(1, "ours")
    notebook.cells[1].source += "  # changed"
    notebook.cells[2].source = "import naranhi"
    (root / "src/naranhi/__init__.py").write_text("")
    folded, [stamp] = taken_up(root, notebook)
    assert not folded
    assert stamp["changed"] == {"cells": 2, "package": True}


def test_a_record_has_no_picture_twice(root):
    kept = json.loads((root / records.FOLDER / "cpu/01_one.json").read_text())["cells"]
    assert kept.keys() == {"same", "time", "measured", "answer"}
    assert kept["time"] == {"source": digest("time()"), "outputs": [{"text": "took 2 s\n"}]}


def test_without_a_record_nothing_is_added(root):
    notebook = chapter(1, "ours")
    records.take_up(notebook, "02_two", root, "On {device}")
    assert len(notebook.cells) == 5
    assert notebook.metadata["naranhi"]["recorded"] == []


def test_the_committed_records_are_of_chapters():
    for stamp in (ROOT / records.FOLDER).glob("*/stamp.json"):
        assert json.loads(stamp.read_text())["name"] == stamp.parent.name
        for file in stamp.parent.glob("[0-9]*.json"):
            [record] = records.load(file.stem, ROOT)
            assert (ROOT / f"notebooks/en/{file.stem}.ipynb").exists()
            assert record.cells


def test_a_page_quotes_a_record_and_nothing_else(root):
    quoted = records.expand("before\n\n%recorded cpu 01_one time\n\nafter", root, "en")
    assert quoted == "before\n\n```text\ntook 2 s\n```\n\nafter"
    assert "01_one" in records.expand("%steps cpu", root, "en").replace("passed", "")
    with pytest.raises(ValueError, match=r"%recorded cpu 01_one absent: nothing like that"):
        records.expand("%recorded cpu 01_one absent", root, "en")
    with pytest.raises(ValueError, match="%recorded moon 01_one time: nothing like that"):
        records.expand("%recorded moon 01_one time", root, "en")


def test_a_list_of_steps_names_each_once(root):
    """A chapter is a step of the run that recorded it, and may have been one of an earlier run."""
    path = root / records.FOLDER / "cpu/stamp.json"
    stamp = json.loads(path.read_text())
    stamp["steps"] = [
        {"step": "tests", "result": "passed", "seconds": 61},
        {"step": "01_one", "result": "stopped: the time was over", "seconds": 9},
    ]
    path.write_text(json.dumps(stamp))
    shutil.copy(path.with_name("01_one.json"), path.with_name("02_two.json"))
    lines = records.expand("%steps cpu", root, "en").splitlines()[1:-1]
    assert [line.split(maxsplit=1) for line in lines] == [
        ["tests", "passed, 61 s"],
        ["01_one", "stopped: the time was over, 9 s"],
        ["02_two", "passed, 9 s"],
    ]


TABLE = """How long
operation  it took
---------  -------
a sum         3 ms
a product    12 ms"""
KOREAN = """"How long": "얼마나"
"operation": "연산"
"it took": "걸린 시간"
"a sum": "합"
"a product": "곱"
"it is quick": "빠르다"
"""


@pytest.fixture
def with_a_table(root, tmp_path):
    """The little project, in whose record a cell shows a table and a claim; and no Korean yet."""
    own = shutil.copytree(root, tmp_path / "with_a_table")
    path = own / records.FOLDER / "cpu/01_one.json"
    content = json.loads(path.read_text())
    shown = [{"text": TABLE}, {"text": "✓ it is quick\nloss 3\n"}]
    content["cells"]["time"]["outputs"] = shown
    path.write_text(json.dumps(content))
    (own / "book/ko/outputs").mkdir(parents=True)
    return own


def test_a_page_shows_a_recorded_table_in_its_own_language(with_a_table):
    line = "%recorded cpu 01_one time"
    english = records.expand(line, with_a_table, "en")
    assert "<caption>How long</caption>" in english and "✓ it is quick\nloss 3" in english
    assert '<th style="text-align:left">operation</th>' in english
    assert '<td style="text-align:right;white-space:nowrap">12 ms</td>' in english
    (with_a_table / "book/ko/outputs/01_one.yml").write_text(KOREAN)
    korean = records.expand(line, with_a_table, "ko")
    for words in ("<caption>얼마나<", ">연산</th>", ">걸린 시간</th>", ">합</td>", "12 ms"):
        assert words in korean
    assert "✓ 빠르다\nloss 3" in korean and "it took" not in korean


def test_a_recorded_heading_without_its_korean_is_named(with_a_table):
    left = KOREAN.replace('"it took": "걸린 시간"\n', "")
    (with_a_table / "book/ko/outputs/01_one.yml").write_text(left)
    with pytest.raises(ValueError, match=r"01_one time: book/ko/outputs does not have 'it took'"):
        records.expand("%recorded cpu 01_one time", with_a_table, "ko")


def test_a_chapter_shows_what_was_recorded_as_a_table_too(with_a_table):
    notebook = chapter(1, "ours")
    records.take_up(notebook, "01_one", with_a_table, "On {device}")
    shown = str(notebook.cells)
    assert "naranhi-record-table" in shown and "<pre>✓ it is quick" in shown
    (with_a_table / "book/ko/outputs/01_one.yml").write_text(KOREAN)
    catalogue = localize.load("ko", with_a_table, "01_one")
    localize.outputs([cell for cell in notebook.cells if cell.cell_type == "code"], catalogue)
    assert "<pre>✓ 빠르다\nloss 3</pre>" in str(notebook.cells).replace("\\n", "\n")


def test_a_record_that_is_damaged_is_named(root):
    path = next((root / records.FOLDER).glob("*/stamp.json"))
    name = next(p.stem for p in path.parent.glob("[0-9]*.json"))
    for damaged in ("{", "{}"):
        path.write_text(damaged)
        with pytest.raises(gpu.CannotBuild, match=r"stamp.json is damaged .* git checkout brings"):
            records.load(name, root)
