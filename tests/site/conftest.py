import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "book"))


@pytest.fixture(scope="session")
def built():
    """The folder of the site, built: which takes seconds when nothing has changed."""
    build = [sys.executable, REPOSITORY / "book" / "build.py", "--jobs", "2"]
    result = subprocess.run(build, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return REPOSITORY / "_build" / "html"
