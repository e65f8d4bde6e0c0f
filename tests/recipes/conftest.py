"""The processes from which the ranks of recipes are forked, and the losses of one process."""

import sys

import pytest
from forked import Forked
from started import ENVIRONMENT, IMPORTED, RECIPES, STEPS, losses, run


@pytest.fixture(scope="package")
def forked():
    """`forked(ranks, script, *options, folder=)`: as `torchrun`, of which it has no process."""
    with Forked(*IMPORTED, **ENVIRONMENT) as server:

        def start(ranks, script, *options, folder):
            return server.run(ranks, RECIPES / script, *options, folder=folder)

        yield start


@pytest.fixture(scope="package")
def single(tmp_path_factory):
    """{step: loss} of one process."""
    folder = tmp_path_factory.mktemp("single")
    found = losses(run([sys.executable, RECIPES / "single.py", *STEPS], folder))
    assert list(found) == [0, 1, 2]
    assert found[0] - found[2] > 0.1, "or the weights' changes would not be told"
    return found
