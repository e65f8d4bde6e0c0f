"""Run the book on a machine with a GPU, and record what it says: ``make gpu``.

    make gpu                       on this machine, in about nine minutes
    make gpu MINUTES=30            with more time, for more chapters
    make gpu WHEELS=wheels         with packages that were carried there (the preflight says which)
    make gpu RESUME=1              what has not passed yet at this commit
    make gpu ONLY="tests one_gpu"  some of the steps
    python book/gpu.py --rehearse  the same steps on a machine without a GPU, recorded in _build

First a preflight: what is missing is said before anything starts. Then, the most telling first:
tests marked ``gpu``, tables of one GPU, chapters, the benchmark of ranks. Each step's result is
written when it ends, so a machine that is taken away loses the step in progress only. What does not
fit into the time is named as not run. Everything goes into one folder, ``book/recorded/MACHINE``;
``make book`` takes it up.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock

from alone import CannotBuild, alone

ROOT = Path(__file__).resolve().parent.parent
TORCH = (2, 11), (2, 13)  # with which the book is tested on GPUs
NCCL = 2, 10  # the first that sums bf16
FREE = 8 * 2**30  # bytes of a GPU's memory, for chapters 01 and 04
# Module: package. What a machine with torch may lack.
PACKAGES = {
    "ipykernel": "ipykernel",
    "ipyparallel": "ipyparallel",
    "cloudpickle": "cloudpickle",
    "nbconvert": "nbconvert",
    "matplotlib": "matplotlib",
    "transformers": "transformers",
    "datasets": "datasets",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist",
    "hypothesis": "hypothesis",
}
# What single chapters need besides; without it they are named as not run.
OPTIONAL = "deepspeed", "torchgpipe"
BENCHMARK = *OPTIONAL, "memray"
INTERRUPTED = "stopped: interrupted"
ANSWERS = 30  # seconds that nvidia-smi has; with a broken driver it never answers
# What a GPU changes most comes first.
RANKS_AND_KERNEL = 5  # processes of a chapter: as many chapters run beside each other as have cores
FIRST = "04_overlap", "01_hierarchy", "07_activation_memory", "12_zero", "19_precision"


def machine(rehearse: bool) -> dict:
    """Return what the machine is: everything that the preflight judges and the stamp says."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "missing": [
            p for module, p in PACKAGES.items() if importlib.util.find_spec(module) is None
        ],
        "rehearse": rehearse,
        "torch": None,
        "gpus": [],
        "others": [],
    }
    facts["smi"] = _smi("name,memory.total,memory.free,driver_version", "gpu")
    facts["driver"] = facts["smi"][0][3] if facts["smi"] else None
    if not facts["smi"] and not rehearse:
        return facts  # says `problems` at once: importing torch takes seconds
    busy = _smi("gpu_uuid,pid", "compute-apps")  # before torch makes this process one of them
    if importlib.util.find_spec("torch") is None:
        return facts
    import torch

    facts["torch"] = torch.__version__
    facts["cuda"] = torch.version.cuda
    facts["error"] = None
    if torch.version.cuda and facts["smi"]:
        try:
            torch.cuda.init()
        except RuntimeError as error:  # an old driver, for example
            facts["error"] = str(error)
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        each = range(torch.cuda.device_count())
        facts["free"] = min(torch.cuda.mem_get_info(i)[0] for i in each)
        visible = {f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in each}
        facts["others"] = [pid for uuid, pid in busy if uuid in visible]
        if torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _smi(fields, kind):
    """Return rows of what nvidia-smi says; none where there is no driver."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", f"--query-{kind}={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ANSWERS)
    except subprocess.TimeoutExpired:
        return []
    rows = done.stdout.splitlines() if done.returncode == 0 else []
    return [[field.strip() for field in row.split(",")] for row in rows if row.strip()]


def problems(facts: dict) -> list[str]:
    """Return what stands in the way, each with what to do about it; empty if nothing does."""
    if not facts["smi"] and not facts["rehearse"]:  # then nothing else is worth mending
        return [
            "no GPU: nvidia-smi is missing, lists none or does not answer. make book needs no GPU"
        ]
    found = []
    if facts["missing"]:
        names = " ".join(facts["missing"])
        found.append(
            f"missing packages: {names}. With a network: make check, which sets up .venv, or "
            f"{sys.executable} -m pip install {names}. Without, on another machine: "
            f"python -m pip download --only-binary=:all: --python-version {facts['python']} "
            f"--platform manylinux_2_28_{platform.machine()} -d wheels {names}, carry the folder "
            "here, and make gpu WHEELS=wheels"
        )
    if facts["torch"] is None:
        return [*found, "torch is not installed for this Python; name another: make PYTHON=... gpu"]
    version = tuple(map(int, facts["torch"].split(".")[:2]))
    if not TORCH[0] <= version <= TORCH[1]:
        low, high = (".".join(map(str, bound)) for bound in TORCH)
        found.append(f"torch is {facts['torch']}; the book runs on {low} to {high}")
    if facts["rehearse"]:
        return found
    if facts["cuda"] is None:
        found.append(
            f"torch {facts['torch']} is built without CUDA; name a Python whose torch has it: "
            "make PYTHON=... gpu"
        )
    elif not facts["gpus"]:
        found.append(
            f"torch {facts['torch']} for CUDA {facts['cuda']} cannot use the GPU with driver "
            f"{facts['driver']}: {facts['error'] or 'no GPU is visible (CUDA_VISIBLE_DEVICES?)'}"
        )
    else:
        if "nccl" not in facts:
            found.append(f"torch {facts['torch']} is built without NCCL")
        elif tuple(map(int, facts["nccl"].split(".")[:2])) < NCCL:
            low = ".".join(map(str, NCCL))
            found.append(f"NCCL is {facts['nccl']}; the book needs {low} or later")
        if facts["free"] < FREE:
            found.append(
                f"a GPU has {facts['free'] / 2**30:.1f} GiB of free memory, and "
                f"{FREE / 2**30:.0f} are needed"
            )
        if facts["others"]:
            found.append(
                f"other processes use the GPU (process {', '.join(facts['others'])}): times would "
                "be wrong; end these processes, or set CUDA_VISIBLE_DEVICES to another GPU"
            )
    return found


def device_of(facts: dict) -> str:
    """Return what the stamp calls the machine."""
    gpus = facts["gpus"]
    return f"{len(gpus)} × {gpus[0]}" if gpus else f"{facts['cores']} cores, no GPU"


def name_of(facts: dict, root: Path) -> str:
    """Return the name of the machine's folder: h100, 8xh100, cpu.

    Args:
        facts: the machine.
        root: where the folders are. If that of the short name is of another device, such as an
            H100 on another board, the name has all the words of the GPU's: h100-pcie.
    """
    if not facts["gpus"]:
        return "cpu"
    words = re.sub(r"NVIDIA|GeForce|Tesla", "", facts["gpus"][0]).split()
    last = next((i for i, word in enumerate(words) if re.search(r"\d", word)), len(words))
    count = f"{len(facts['gpus'])}x" if len(facts["gpus"]) > 1 else ""
    short, long = (
        count + re.sub(r"[^a-z0-9]+", "-", " ".join(part).lower())
        for part in (words[: last + 1], words)
    )
    before = _stamp(root / short)
    return short if before is None or before["device"] == device_of(facts) else long


def _stamp(folder):
    """Return the stamp of a folder, or None if it has none."""
    try:
        return json.loads((folder / "stamp.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


class Steps:
    """Run one command after another until the time is over, and write down how each ended.

    Args:
        folder: where the stamp and the logs are written.
        stamp: what the machine is; the steps are added to it.
        seconds: the time for all steps.
        lock: the descriptor of `alone`, which steps inherit: where this process is killed, no other
            begins before the step that it has left has ended.
    """

    def __init__(self, folder: Path, stamp: dict, seconds: float, lock: int | None = None) -> None:
        self.folder, self.stamp, self.end = folder, stamp, time.monotonic() + seconds
        self.lock = lock
        self.one = Lock()  # to print and write, where steps run beside each other
        self.running, self.interrupted = set(), False
        self.write()

    def run(self, name: str, command: list[str], least: float) -> None:
        """Run a step if `least` seconds are left; stop it when the time is over."""
        if any(step["step"] == name and self._is_of_now(step) for step in self.stamp["steps"]):
            return
        start = time.monotonic()
        left = self.end - start
        if left < least:
            return self.leave_out(name, "no time was left")
        result = self._run(command, self.folder / f"{name}.log", left)
        self._note(name, result, round(time.monotonic() - start))

    def interrupt(self) -> None:
        """Stop the steps that run in other threads, and start no other."""
        with self.one:
            self.interrupted = True
            for process in self.running:
                _kill(process)

    def _run(self, command, log, seconds):
        """Run a command, its output to a log: "passed", "failed", or why it was stopped."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with log.open("w") as file:
            with self.one:
                if self.interrupted:
                    return INTERRUPTED
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    pass_fds=[] if self.lock is None else [self.lock],
                )
                self.running.add(process)
            try:
                process.wait(seconds)
                result = "failed" if process.returncode else "passed"
            except subprocess.TimeoutExpired:
                result = "stopped: the time was over"
            finally:
                _kill(process)  # and what it has left
                process.wait()
                with self.one:
                    self.running.discard(process)
        text = log.read_text(errors="replace")
        text = text.replace(str(ROOT), ".")
        home = os.environ.get("HOME", "").rstrip("/")
        if home:
            text = text.replace(home, "~")
        log.write_text(text[-20_000:])
        return INTERRUPTED if self.interrupted else result

    def leave_out(self, name: str, reason: str) -> None:
        """Write down that a step is not run, and why; what has passed before stays."""
        if any(s["step"] == name and s["result"] == "passed" for s in self.stamp["steps"]):
            return print(f"  {name}: not run: {reason}; it passed before", flush=True)
        self._note(name, f"not run: {reason}", 0)

    def _note(self, name, result, seconds):
        with self.one:
            print(f"  {name}: {result}, {seconds} s", flush=True)
            others = [step for step in self.stamp["steps"] if step["step"] != name]
            step = {"step": name, "result": result, "seconds": seconds}
            self.stamp["steps"] = [*others, {**step, "commit": self.stamp["commit"]}]
            self.write()

    def _is_of_now(self, step):
        commit = self.stamp["commit"]
        # With a +, files have changed since: perhaps others than those of the step.
        return step["commit"] == commit is not None and not commit.endswith("+")

    def write(self) -> None:
        """Write the stamp as it is now."""
        import records  # not at the top: the preflight says if what it imports is missing

        records.write(self.folder, "stamp.json", self.stamp)


def _kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def chapter(name: str, folder: Path, jobs: int) -> None:
    """Execute a chapter here, one of so many at a time, and write its record."""
    import execution
    import records

    source = ROOT / "notebooks" / execution.EXECUTED / f"{name}.ipynb"
    executed = execution.execute(source, ROOT, jobs)
    records.write(folder, f"{name}.json", records.reduce(executed))


def chapters() -> list[str]:
    """Return the chapters, the most telling first."""
    names = sorted(path.stem for path in (ROOT / "notebooks/en").glob("*.ipynb"))
    first = [name for name in FIRST if name in names]
    return first + [name for name in names if name not in first]


def steps_in_order() -> list[str]:
    """Return all steps."""
    return ["tests", "one_gpu", *chapters(), "bench"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the book on this machine's GPU.")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps (default 9)")
    parser.add_argument("--into", type=Path, help="the folder, by default book/recorded/MACHINE")
    parser.add_argument("--only", nargs="*", default=[], help="these steps, instead of all")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, into _build")
    parser.add_argument("--commit", help="commit for the stamp, in a copy without git")
    parser.add_argument("--resume", action="store_true", help="leave out what passed before")
    parser.add_argument("--chapter", help=argparse.SUPPRESS)  # a step of its own
    parser.add_argument("--jobs", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.commit:
        os.environ["NARANHI_COMMIT"] = options.commit  # for `execution.commit`, in each step
    if options.chapter:
        chapter(options.chapter, options.into, options.jobs)
        return 0
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: there has to be time for a step")
    unknown = [name for name in options.only if name not in steps_in_order()]
    if unknown:
        parser.error(f"no step is called {', '.join(unknown)}, only {', '.join(steps_in_order())}")
    facts = machine(options.rehearse)
    found = problems(facts)
    if found:
        print("\n".join(f"make gpu: {problem}" for problem in found), file=sys.stderr)
        return 1
    import execution

    root = ROOT / ("_build/recorded" if options.rehearse else "book/recorded")
    folder, wanted = options.into or root, options.only or steps_in_order()
    kept = "date", "driver", "torch", "nccl", "python", "cores"
    try:
        name = name_of(facts, root)
        folder = (options.into or root / name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        stamp = {
            "name": name,
            "device": device_of(facts),
            **{key: facts[key] for key in kept if facts.get(key) is not None},
            "commit": execution.commit(ROOT),
        }
        stamp["steps"] = before(folder, stamp, wanted, options.resume)
    except (OSError, ValueError) as error:  # of a record that is damaged
        print(f"make gpu: {folder} cannot be used: {error}", file=sys.stderr)
        return 1
    stop_when_lost()
    print(f"{stamp['device']}, torch {stamp['torch']}: {options.minutes:g} minutes, into {folder}")
    try:
        with alone(ROOT / "_build") as lock:
            return record(folder, stamp, wanted, options, facts, lock)
    except CannotBuild as refused:
        print(f"make gpu: {refused}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make gpu: interrupted; RESUME=1 goes on", file=sys.stderr)
        return 130


def stop_when_lost() -> None:
    """End this process as Ctrl-C does, with what it has started, on a signal that means the end.

    The scheduler sends SIGTERM; a terminal that is gone, SIGHUP.
    """
    for number in signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def before(folder: Path, stamp: dict, wanted: list[str], resume: bool) -> list[dict]:
    """Return the steps of earlier runs in this folder that stay, each of its own commit.

    Those are the steps that are not wanted now, and to resume, those that passed; all of the same
    device and torch.
    """
    earlier = _stamp(folder)
    if earlier is None or any(earlier.get(key) != stamp.get(key) for key in ("device", "torch")):
        return []
    return [
        step
        for step in earlier["steps"]
        if step["step"] not in wanted or (resume and step["result"] == "passed")
    ]


def record(
    folder: Path,
    stamp: dict,
    wanted: list[str],
    options: argparse.Namespace,
    facts: dict,
    lock: int | None = None,
) -> int:
    """Run the wanted steps; 0 if none failed, and one passed."""
    steps = Steps(folder, stamp, 60 * options.minutes, lock)
    python = sys.executable
    # By name: to collect all tests would import what the machine need not have.
    marked = [str(path) for path in sorted(ROOT.glob("tests/*/test_*.py")) if _is_marked(path)]
    if "tests" in wanted:
        tests = ["-m", "gpu", *marked] if not options.rehearse else ["tests/gpu/test_branches.py"]
        steps.run("tests", [python, "-m", "pytest", *tests], 60)
    if "one_gpu" in wanted:
        tables = [python, "-m", "tests.benchmarks.one_gpu", "--into", str(folder / "one_gpu.json")]
        steps.run("one_gpu", [*tables, *(["--device", "cpu"] if options.rehearse else [])], 60)
    names = [name for name in chapters() if name in wanted]
    first = [name for name in names if name in FIRST]  # what they measure is the GPU
    for name in first:
        _execute(steps, name)
    # On several GPUs the ranks of two chapters would share them.
    width = 1 if len(facts["gpus"]) > 1 else max(1, facts["cores"] // RANKS_AND_KERNEL)
    _beside(steps, names[len(first) :], width)
    if "bench" in wanted:
        bench = [python, "-m", "tests.benchmarks", "--quick", "--into", str(folder / "bench.json")]
        _run_or_leave_out(steps, "bench", bench, 120, BENCHMARK)
    results = {step["step"]: step["result"] for step in stamp["steps"] if step["step"] in wanted}
    failed = [name for name, result in results.items() if result == "failed"]
    if failed:
        print(f"make gpu: failed: {', '.join(failed)}; see the logs in {folder}", file=sys.stderr)
    elif "passed" not in results.values():
        print("make gpu: no step passed; with more time: make gpu MINUTES=30", file=sys.stderr)
        return 1
    return 1 if failed else 0


def _beside(steps, names, width):
    """Execute chapters, some at a time; when interrupted, leave none running."""
    with ThreadPoolExecutor(width) as pool:
        try:
            list(pool.map(partial(_execute, steps, jobs=width), names))
        except BaseException:
            steps.interrupt()
            pool.shutdown(cancel_futures=True)
            raise


def _is_marked(path):
    return "mark.gpu" in path.read_text(encoding="utf-8")


def _execute(steps, name, jobs=1):
    notebook = json.loads((ROOT / f"notebooks/en/{name}.ipynb").read_text(encoding="utf-8"))
    code = "".join(
        line for cell in notebook["cells"] if cell["cell_type"] == "code" for line in cell["source"]
    )
    command = [sys.executable, __file__, "--chapter", name, "--into", str(steps.folder)]
    command += ["--jobs", str(jobs)]
    _run_or_leave_out(steps, name, command, 45, [p for p in OPTIONAL if p in code])


def _run_or_leave_out(steps, name, command, least, packages):
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        return steps.leave_out(name, f"it needs {', '.join(missing)}")
    steps.run(name, command, least)


if __name__ == "__main__":
    sys.exit(main())
