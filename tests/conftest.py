import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from gloo_ranks import Ranks, in_a_world
from xdist.scheduler import LoadScopeScheduling

# A shell starts what it puts in the background deaf to Ctrl-C, and so would be all processes that
# the tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What `models.gpt2`, and optimizers, import when they are made: seconds, which would be the call's.
LATE = ["transformers.models.gpt2.modeling_gpt2", "torch._dynamo"]


@pytest.fixture(scope="session")
def needs():
    """``needs("chromium", "chromium")``: the program's path, else skip with what to install.

    On CI nothing that is missing may pass for tested, so there it is a failure.
    """

    def path(program, package, as_root=False):
        found = shutil.which(program)
        missing = None
        if found is None:
            missing = f"{program} is not installed (Debian's package {package})"
        elif as_root and os.geteuid() != 0:
            missing = f"{program} has to be set up as root"
        if missing:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
        return found

    return path


@pytest.fixture(scope="session")
def five():
    """Five ranks for the whole session; a test that needs fewer makes groups of them."""
    with Ranks(5, 40.0, ["torch.distributed", *LATE]) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight(request, tmp_path_factory):
    """`eight(ranks, function, *args)`: its results on a world of as many, of eight processes."""
    with Ranks(8, 60.0, [request.module.__name__, *LATE, "datasets"]) as pool:

        def call(ranks, function, *args):
            store = tempfile.mktemp(dir=tmp_path_factory.getbasetemp())
            return pool.call(in_a_world, ranks, store, function, *args)[:ranks]

        yield call


# What a folder's tests need; the longest first, so that no process is left with it in the end.
FOLDERS = {
    "notebooks": "notebooks",
    "site": "browser",
    "world": "ranks",
    "recipes": "ranks",
    "train": "ranks",
    "benchmarks": "ranks",
    "cluster": "slurm",
}
# What shares `_build`, or looks at all processes of the machine.
TOGETHER = {"notebooks": "book", "site": "book", "world": "world", "cluster": "world"}


def pytest_collection_modifyitems(items):
    """Mark each test by what it needs."""
    folders = [*FOLDERS]
    items.sort(key=lambda item: folders.index(name) if (name := folder(item)) in FOLDERS else 99)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU (`make gpu` on such a machine)"))
        if folder(item) in FOLDERS:
            item.add_marker(FOLDERS[folder(item)])
        elif "Ranks" in vars(item.module) or {"five", "eight"} & set(item.fixturenames):
            item.add_marker("ranks")


def folder(item):
    return item.path.parent.name


class InGroups(LoadScopeScheduling):
    """A file's tests are run by one process, and so are those of folders that go together."""

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return TOGETHER.get(Path(file).parent.name, file)


def pytest_xdist_make_scheduler(config, log):
    return InGroups(config, log)
