"""Execute a notebook once, and know when its outputs are still true.

An executed notebook lies in ``_build/executed/NAME.ipynb``.  In its metadata, under ``naranhi``, it
carries ``key`` (what its outputs depend on) and ``executed`` (when, on what and from which commit).
The key is made of

- ``cells``: the code cells, in order;
- ``modules``: each module of ``src/naranhi`` that they import, directly or through another, with
  the hash of its text, found by reading the import statements and running nothing; the tables and
  other data beside these modules; and the recipes, where a cell names their folder;
- ``requirements``: the hash of ``requirements.txt``;
- ``device``: ``cpu``, or ``cuda`` where torch sees a GPU.

A build takes any executed notebook whose key is this checkout's, of whatever device: one that was
executed on a node with GPUs is not executed again on the laptop where the book is built.
"""

import ast
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

# jsonschema, which checks notebooks, would compile a grammar for addresses that they do not have:
# most of a second in every process that imports nbformat.
sys.modules.setdefault("rfc3987_syntax", None)

import nbformat  # noqa: E402
from IPython.core.inputtransformer2 import TransformerManager  # noqa: E402
from languages import EXECUTED  # noqa: E402
from nbclient.exceptions import CellControlSignal, DeadKernelError  # noqa: E402
from nbconvert.preprocessors import ExecutePreprocessor  # noqa: E402
from traitlets.config import Config  # noqa: E402

PACKAGE = "naranhi"
DATA = {".csv", ".gz", ".json"}
SECONDS = 900  # for one notebook; the book's own rule is 90
# Asked of the kernel at the end: what carried the messages of the notebook's ranks.  That a machine
# has a GPU does not say so, as four ranks need four.
BACKENDS = """
import builtins as _python  # a chapter may have given a name such as `type` to something else
_python.sorted(
    {v.backend for v in _python.globals().values() if _python.type(v).__name__ == "World"}
)
"""


class ExecutionFailed(Exception):
    """A notebook did not run to its end: the message names the notebook, the cell and the error."""


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def modules_used(sources: list[str], package: Path) -> dict[str, Path]:
    """The modules of a package that pieces of Python import, directly or through one another.

    Args:
        sources: texts of Python; lines of IPython magic in them are passed over.
        package: the package's folder, for example ``src/naranhi``.

    Returns:
        Their dotted names and files.  A name in a string counts when it is exactly a module's
        (``python -m naranhi.train``, ``import_module``), and so does ``naranhi.costs`` after
        ``import naranhi``.
    """
    files = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    used: dict[str, Path] = {}

    def add(name: str) -> None:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            module = ".".join(parts[:length])
            if module in files and module not in used:
                used[module] = files[module]
                home = module if files[module].name == "__init__.py" else module.rpartition(".")[0]
                look(files[module].read_text(encoding="utf-8"), home)

    def look(source: str, home: str) -> None:
        for level, name in _mentioned(source):
            if level:
                above = home.split(".")
                name = ".".join([*above[: len(above) - level + 1], name])
            if level is not None or name in files:
                add(name)

    for source in sources:
        plain = "\n".join(line for line in source.splitlines() if line[:1] not in "%!")
        # `x = %time f()` is Python when IPython has transformed it.
        look(TransformerManager().transform_cell(plain), "")
    return used


@cache
def _mentioned(source: str) -> list[tuple[int | None, str]]:
    """What a text of Python imports or names: (the level of a relative import or 0, dotted name).

    The level of a string is None. The chapters share most of the modules that they import.
    """
    found = []
    try:
        tree = ast.parse(source)
    except SyntaxError:  # another language, or a mistake, which the execution will name
        return found
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                found += [(0, name.name) for name in names]
            case ast.ImportFrom(module, names, level):
                base = f"{module}." if module else ""
                found += [(level, f"{base}{name.name}") for name in names]
            case ast.Attribute():
                found.append((0, ast.unparse(node)))
            case ast.Constant(str() as text):
                found.append((None, text))
    return list(dict.fromkeys(found))


def data_beside(modules: dict[str, Path], package: Path) -> dict[str, Path]:
    """The files of data that belong to the packages of some modules: tables, a tokenizer."""
    folders = {file.parent for file in modules.values()}
    found = {}
    for file in package.rglob("*"):
        if file.is_file() and file.suffix in DATA:
            home = next(up for up in file.parents if (up / "__init__.py").exists())
            if home in folders:
                found[file.relative_to(package.parent).as_posix()] = file
    return found


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def key(notebook, root: Path) -> dict:
    """What a notebook's outputs depend on, device aside."""
    cells = code_cells(notebook)
    flow = {"raises-exception", "skip-execution"}
    text = [[c.id, c.source, sorted(flow & set(c.metadata.get("tags", [])))] for c in cells]
    sources = [cell.source for cell in cells]
    modules = modules_used(sources, root / "src" / PACKAGE)
    modules |= data_beside(modules, root / "src" / PACKAGE)
    if any('"recipes"' in source for source in sources):
        recipes = (root / "src/recipes").rglob("*.*")
        modules |= {
            file.relative_to(root / "src").as_posix(): file
            for file in recipes
            if file.is_file() and file.suffix not in (".pyc", ".md")
        }
    return {
        "cells": digest(repr(text)),
        "modules": {name: digest(file.read_bytes()) for name, file in sorted(modules.items())},
        "requirements": digest((root / "requirements.txt").read_bytes()),
    }


def why_stale(executed, now: dict, jobs: int = 1) -> str | None:
    """Why an executed notebook (or None) does not stand for the key ``now``; None when it does.

    Args:
        jobs: beside how many, itself included, it may have been executed.
    """
    if executed is None or PACKAGE not in executed.metadata:
        return "not executed yet"
    before = executed.metadata[PACKAGE]["key"]
    if before["cells"] != now["cells"]:
        return "its cells changed"
    if before["modules"] != now["modules"]:
        names = {*before["modules"], *now["modules"]}
        changed = sorted(n for n in names if before["modules"].get(n) != now["modules"].get(n))
        return f"{', '.join(changed)} changed"
    if before["requirements"] != now["requirements"]:
        return "requirements.txt changed"
    if "device" in now and before["device"] != now["device"]:
        return f"executed on {before['device']}, but this machine is {now['device']}"
    if executed.metadata[PACKAGE]["executed"].get("jobs", 1) > jobs:
        return "executed at the same time as another notebook, which disturbs its measurements"
    return None


def device() -> str:
    import torch  # seconds to import: only a build that executes asks for the device

    return "cuda" if torch.cuda.is_available() else "cpu"


def machine() -> str:
    """The processor, its cores that we may use, and the GPUs."""
    import torch

    name = platform.machine()
    if Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        models = re.findall(r"model name\s*: (.*)", text)
        name = models[0] if models else name
    parts = [f"{name}, {len(os.sched_getaffinity(0))} cores"]
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}")
    return "; ".join(parts)


def commit(root: Path) -> str | None:
    """The commit of what is executed, with a ``+`` when files differ; None outside of git.

    Of a copy that git does not know, NARANHI_COMMIT says it.
    """
    if named := os.environ.get("NARANHI_COMMIT"):
        return named
    inputs = ["src", f"notebooks/{EXECUTED}", "requirements.txt"]

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)

    if shutil.which("git") is None:
        return None
    head = git("rev-parse", "--short", "HEAD")
    # A copy of the files below another project's repository has no commit.
    if head.returncode or git("ls-files", "--error-unmatch", "_config.yml").returncode:
        return None
    return head.stdout.strip() + ("+" if git("status", "--porcelain", "--", *inputs).stdout else "")


def say(line: str) -> None:
    """Print a line at once and whole, also where output is unbuffered and two processes print."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class _Executor(ExecutePreprocessor):
    """nbconvert's own preprocessor, telling how far it is and leaving no time stamps in cells."""

    def __init__(self, name: str, cells: int, sockets: str, **kwargs):
        started = last = time.monotonic()
        self.cell = None

        def progress(cell, cell_index) -> None:
            nonlocal last
            self.cell, now = cell, time.monotonic()
            count = sum(c.cell_type == "code" for c in self.nb.cells[: cell_index + 1])
            line = f"  {name}: cell {min(count, cells)} of {cells}, {now - started:.0f} s"
            if sys.stdout.isatty():
                print(f"\r{line} ", end="", flush=True)
            elif now - last > 10:
                say(line)
                last = now

        super().__init__(
            kernel_name="python3",
            # Not by TCP: ports are chosen before the kernel binds them, and another may be quicker.
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            record_timing=False,
            timeout_func=lambda cell: max(1, SECONDS - int(time.monotonic() - started)),
            on_cell_start=progress,
            **kwargs,
        )

    def create_kernel_manager(self):
        """Take this interpreter, and no other that a user has installed under the same name."""
        manager = super().create_kernel_manager()
        manager.kernel_spec_manager.kernel_dirs = []
        return manager


def execute(source: Path, root: Path, jobs: int = 1):
    """Execute a notebook of ``root`` and put it in ``_build/executed`` if it runs to its end.

    Args:
        jobs: how many are executed at a time, which is written down.

    Returns:
        The notebook with its outputs.

    Raises:
        ExecutionFailed: a cell raised, took too long, or lost its kernel.  What had been executed
            before stays; the outputs up to the error go to ``_build/failed``.
    """
    notebook = nbformat.read(source, as_version=4)
    name = source.stem
    state = {**key(notebook, root), "device": device()}
    executed = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": state["device"],
        "machine": machine(),
        "torch": importlib.metadata.version("torch"),
        "commit": commit(root),
        "jobs": jobs,
    }
    # The notebook imports this checkout, whatever else is installed: the key speaks of its files.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    started = time.monotonic()
    # The address of a socket has 107 characters at most.
    sockets = tempfile.TemporaryDirectory(dir="/tmp" if len(tempfile.gettempdir()) > 60 else None)
    executor = _Executor(name, len(code_cells(notebook)), sockets.name)
    notebook.cells.append(nbformat.v4.new_code_cell(BACKENDS))
    try:
        executor.preprocess(notebook, {"metadata": {"path": str(source.parent)}})
    except Exception as error:
        if executor.cell is None:  # whatever it is: the kernel manager's, a socket's, a disk's
            raise ExecutionFailed(
                f"{source.relative_to(root)}: its kernel did not start:\n{error}"
            ) from error
        if not isinstance(error, (CellControlSignal, DeadKernelError, TimeoutError)):
            raise
        del notebook.cells[-1]
        save(notebook, root / "_build" / "failed" / source.name)
        cause = f"{error.ename}: {error.evalue}" if hasattr(error, "ename") else str(error)
        cause = re.sub(r"\x1b\[[0-9;]*m", "", cause).strip()
        raise ExecutionFailed(
            f"{source.relative_to(root)}, cell {executor.cell.id!r}, "
            f"after {time.monotonic() - started:.0f} s:\n{cause}\n"
            f"(the outputs up to there: _build/failed/{source.name})"
        ) from error
    finally:
        sockets.cleanup()
        if sys.stdout.isatty():
            print("\r\x1b[K", end="")
    executed["seconds"] = round(time.monotonic() - started)
    # A thread that a cell has left may print there too.
    [answer] = [o for o in notebook.cells.pop().outputs if o.output_type == "execute_result"]
    executed["backends"] = ast.literal_eval(answer["data"]["text/plain"])
    notebook.metadata[PACKAGE] = {"key": state, "executed": executed}
    save(notebook, place(name, root))
    say(f"  {name}: executed in {executed['seconds']} s")
    return notebook


def missed(notebook) -> list[str]:
    """The claims about measured times that were false when the notebook was executed.

    ``naranhi.check`` prints them with a ✗ and goes on (also on ranks, which are named before it).
    """
    text = "".join(
        output.text
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "stream"
    )
    return re.findall(r"^(?:\[ranks? [^]]*\] )?✗ (.*)", text, re.MULTILINE)


def save(notebook, path: Path) -> None:
    """Write a notebook: a reader of ``path`` sees the old one or the new one."""
    write(path, nbformat.writes(notebook) + "\n")


def write(path: Path, text: str) -> None:
    """Write a text in one step, into a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(f".{os.getpid()}")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def place(name: str, root: Path) -> Path:
    """Where the executed notebook of that name is, or will be."""
    return root / "_build" / "executed" / f"{name}.ipynb"


def load(name: str, root: Path):
    """The executed notebook of that name; None if there is none, or what is there is damaged."""
    path = place(name, root)
    try:
        return nbformat.read(path, as_version=4) if path.exists() else None
    except nbformat.reader.NotJSONError:
        return None
