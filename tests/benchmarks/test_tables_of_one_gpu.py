"""The tables of one GPU, made on a CPU; and what they refuse."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks import one_gpu

ROOT = Path(__file__).parents[2]


def test_all_tables_are_made_and_written(tmp_path):
    """The one that fails leaves the others, and the command says so."""
    program = (
        "import sys; from tests.benchmarks import one_gpu\n"
        "one_gpu.TABLES['broken'] = lambda machine: 1 / 0\n"
        f"sys.argv[1:] = ['--device', 'cpu', '--into', {str(tmp_path / 'tables.json')!r}]\n"
        "sys.exit(one_gpu.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    cells = json.loads((tmp_path / "tables.json").read_text())["cells"]
    assert list(cells) == list(one_gpu.TABLES)
    rows = {name: cell["outputs"][0]["text"].splitlines()[2:] for name, cell in cells.items()}
    assert len(rows["block-parts"]) == len(one_gpu.SIZES["cpu"].widths)
    assert [line.split()[2] for line in rows["model-state"]] == 6 * ["16"]
    counted = [line.split("  ")[1:] for line in rows["recomputation"]]
    assert all(one[0].strip() == one[1].strip() for one in counted)
    works = [line.split("  ")[0] for line in rows["beside"]]
    assert len(set(works)) == 10 and works.count("1F1B, 4 micro-batches") == 3


def test_tables_that_fail_leave_the_earlier_ones(tmp_path, monkeypatch):
    """And some that are made anew leave the others: a page shows all of them."""
    into = tmp_path / "one_gpu.json"
    monkeypatch.setenv("LOCAL_RANK", "0")  # which `record` sets, and here is undone
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def made(only=("a", "b"), **texts):
        for name in "ab":
            rows = [[texts[name]]] if name in texts else None  # of which no table can be made
            monkeypatch.setitem(one_gpu.TABLES, name, lambda machine, rows=rows: (["x"], rows))
        result = one_gpu.record(argparse.Namespace(into=into, device="cpu", only=only))
        cells = json.loads(into.read_text())["cells"]
        return result, {name: cells[name]["outputs"][0]["text"].split()[-1] for name in cells}

    assert made(a="old", b="1") == (0, {"a": "old", "b": "1"})
    assert made(a="new") == (1, {"a": "old", "b": "1"})
    part = json.loads((tmp_path / "one_gpu.part.json").read_text())["cells"]
    assert list(part) == ["a"]
    assert made(only=["a"], a="new") == (0, {"a": "new", "b": "1"})


def test_a_contender_that_computes_something_else_is_named():
    made = {"right": lambda: [torch.ones(4)], "wrong": lambda: [torch.full([4], 1.02)]}
    with pytest.raises(AssertionError, match=r"a sum: wrong is off by 2\.0e-02"):
        one_gpu.agree(one_gpu.Contest("a sum", {}, 0.01), made)
    one_gpu.agree(one_gpu.Contest("a sum", {}, 0.03), made)
    with pytest.raises(AssertionError, match="nan"):
        made["wrong"] = lambda: [torch.full([4], torch.nan)]
        one_gpu.agree(one_gpu.Contest("a sum", {}, 0.03), made)
