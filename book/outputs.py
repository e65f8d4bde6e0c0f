"""What a chapter shows besides its measurements, and the committed record of that.

Two executions of a chapter have to show the same. To execute each twice takes twice as long. So
``python book/build.py --record`` writes down what an execution showed, as a hash for each cell, and
the next execution is compared with the record. A record stands for the cells, modules and
requirements that it was made from; where it does not stand, or differs (processors may round
otherwise), the chapter is executed twice (``tests/notebooks/test_same_twice.py``).
"""

import json
import re
from pathlib import Path

import execution
import nbformat
from execution import digest

FOLDER = Path("book/recorded/outputs")
# A claim that ``naranhi.check`` calls measured, whether it held or not.
MEASURED = re.compile(r"^.*(✓ .*\bmeasured\)|✗ .*)\n", re.MULTILINE)


def unmeasured(notebook) -> dict[str, str]:
    """For each code cell, by id, what it shows and does not mark as a measurement."""
    return {cell.id: _said(cell.outputs) for cell in execution.code_cells(notebook)}


def _said(outputs) -> str:
    """What each stream says as a whole (a kernel may send it in parts), then all else in order."""
    streams, rest = {"stdout": "", "stderr": ""}, []
    for output in outputs:
        match output.output_type:
            case "stream":
                streams[output.name] += output.text
            case "error":
                rest.append((output.ename, output.evalue))
            case _ if not output.get("metadata", {}).get("naranhi", {}).get("measured", False):
                rest.append(sorted(output.data.items()))
    streams = {name: MEASURED.sub("", text) for name, text in streams.items()}
    return repr((streams, rest))


def record(root: Path) -> list[str]:
    """Write down what each executed chapter showed; the names of those without an execution."""
    missing = []
    for source in sorted((root / "notebooks" / execution.EXECUTED).glob("*.ipynb")):
        executed = execution.load(source.stem, root)
        now = execution.key(nbformat.read(source, as_version=4), root)
        if execution.why_stale(executed, now, jobs=99):
            missing.append(source.stem)
            continue
        path = root / FOLDER / f"{source.stem}.json"
        cells = {name: digest(text) for name, text in unmeasured(executed).items()}
        kept = {"key": _hash(now), "cells": cells}
        execution.write(path, json.dumps(kept, indent=1) + "\n")
    return missing


def recorded(executed, name: str, root: Path) -> dict[str, str] | None:
    """The record that an executed chapter is to be compared with: the hash of each cell, or None.

    None where it was made from something else.
    """
    path = root / FOLDER / f"{name}.json"
    if not path.exists():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    key = {k: v for k, v in executed.metadata["naranhi"]["key"].items() if k != "device"}
    return kept["cells"] if kept["key"] == _hash(key) else None


def _hash(key):
    return digest(json.dumps(key, sort_keys=True))
