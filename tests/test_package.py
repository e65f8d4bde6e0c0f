"""The package as a whole: what it is imported as, and what was called otherwise."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import naranhi

WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
WALL_CLOCK |= {"date.today", "datetime.datetime.now", "datetime.date.today"}
PURE = "import sys, naranhi.{}; sys.exit('torch' in sys.modules)"


@pytest.mark.parametrize("name", naranhi.MOVED)
def test_an_old_module_is_no_longer_there_and_its_error_names_the_new_one(name):
    where, _, attribute = re.fullmatch(r"([\w.]+)( \((\w+)\))?.*", naranhi.MOVED[name]).groups()
    found = importlib.import_module(where)
    assert attribute is None or hasattr(found, attribute)
    with pytest.raises(ImportError, match=re.escape(f"naranhi.{name} has moved to {where}")):
        exec(f"from naranhi import {name}")


def test_what_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'naranhi' has no attribute 'nothing'"):
        _ = naranhi.nothing


def test_a_module_fits_into_300_lines():
    package = Path(naranhi.__file__).parent
    lengths = {path: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    long = {str(path.relative_to(package)): n for path, n in lengths.items() if n > 300}
    assert not long


@pytest.mark.slow
def test_every_public_name_has_a_type(needs):
    """A test, so that it is made beside others; .venv stays as it is."""
    command = [needs("make", "make"), "--old-file=.venv/.ready", "types"]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["world.lifeline", "world.leftovers", "distributed.processes"])
def test_helper_processes_import_no_torch(module):
    assert subprocess.run([sys.executable, "-c", PURE.format(module)], timeout=60).returncode == 0


def test_no_time_is_of_the_wall_clock():
    """Which jumps. What is waited or measured is monotonic; words for a reader may have a date."""
    for path in (Path(__file__).parents[1] / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            read = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.ImportFrom):
                read = " ".join(f"{node.module}.{name.name}" for name in node.names)
            assert not WALL_CLOCK & {*read.split()}, f"{path}:{node.lineno} reads {read}"
