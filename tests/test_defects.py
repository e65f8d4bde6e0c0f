"""`DEFECTS.md` names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [
    line
    for line in (TESTS / "DEFECTS.md").read_text().splitlines()
    if re.match(r"\| (?!\*\*|---|what (is|was) )", line)
]


def functions(path):
    return {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}


def test_both_tables_are_read():
    assert len(ROWS) > 80


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip()[:50] for row in ROWS])
def test_each_row_names_tests_that_exist(row):
    *_, now, cell = row.strip("|").split("|")
    named = re.fullmatch(r"(?:,? `([\w/]+\.py)::(test_\w+)`)+", cell.rstrip())
    assert named and now.strip(), row
    for file, function in re.findall(r"`([\w/]+\.py)::(test_\w+)`", cell):
        assert function in functions(TESTS / file), f"tests/{file} has no {function}"
