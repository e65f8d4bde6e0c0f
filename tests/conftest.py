import os

# OpenMP's threads would wait for each other by spinning, here and in all that tests start, on cores
# that other tests want: tests of one process took 2.5 times the processor's time beside others. It
# is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Where it is set, `print` writes each of its arguments by itself, and then lines that two ranks
# print into one pipe run into each other.
os.environ.pop("PYTHONUNBUFFERED", None)

import contextlib
import gc
import shutil
import signal
from pathlib import Path

import hypothesis
import pytest
import torch
from gloo_ranks import Ranks
from xdist.scheduler import LoadScopeScheduling

# Ranks wake each other all the time, and there are more of them than cores. By default the woken
# one runs at once, in place of who woke it. With that, gloo's threads spent a fifth of the ranks'
# time in `epoll_wait` that returned at once; probably for a connection's lock, whose holder could
# not go on. All processes that tests start inherit this policy.
if hasattr(os, "sched_setscheduler"):
    with contextlib.suppress(PermissionError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# `sitecustomize` there is imported by each Python that tests start, workers of pytest among them.
STARTUP = str(Path(__file__).parent / "support" / "startup")
if STARTUP not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, paths)])

# Nothing is collected until all is imported (`pytest_collection_finish`).
gc.disable()

# A shell starts what it puts in the background deaf to Ctrl-C, and so would be all processes that
# the tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example of a property may take long, because the machine may be busy.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")


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
    with Ranks(5, 40.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight():
    """`eight(ranks, function, *args)`: its results on a world of as many, of eight processes."""
    with Ranks(8, 180.0) as pool:
        yield pool.call_in_a_world


# What a folder's tests need; after the chapters and the site, the longest first.
FOLDERS = {
    "notebooks": "notebooks",
    "site": "browser",
    "world": "ranks",
    "recipes": "ranks",
    "train": "ranks",
    "benchmarks": "ranks",
    "cluster": "slurm",
}
# What shares `_build`, or looks at all processes of the machine: a file, or a folder.
TOGETHER = {
    "notebooks/test_same_twice.py": "book",
    "site": "book",
    "world": "world",
    "cluster": "world",
}
# What holds measured times against others or against a bound close by: last, and beside nothing.
QUIET = {
    "distributed/test_paced_links.py",
    "measure/test_hardware.py",
    "measure/test_link_between_two.py",
    "measure/test_timing.py",
    "pipeline/test_bubble.py",
    "planning/test_rehearsed_meshes.py",
}


def pytest_collection_modifyitems(items):
    """Mark each test by what it needs, and order them."""
    gone = [name for name in (*TOGETHER, *QUIET) if not (Path(__file__).parent / name).exists()]
    assert not gone, f"tests/conftest.py names {gone}, which are not there"
    folders, first_and_last = [*FOLDERS], {"book": 0, "quiet": 2}
    items.sort(key=lambda item: folders.index(name) if (name := folder(item)) in FOLDERS else 99)
    items.sort(key=lambda item: first_and_last.get(group(item.path), 1))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU (`make gpu` on such a machine)"))
        if folder(item) in FOLDERS:
            item.add_marker(FOLDERS[folder(item)])
        elif "Ranks" in vars(item.module) or {"five", "eight"} & set(item.fixturenames):
            item.add_marker("ranks")


def pytest_collection_finish():
    """Freeze what the tests have imported, and collect rarely.

    Each collection would scan the imported objects, which took a quarter of the time of tests in
    one process. The higher threshold saves most of the rest.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def folder(item):
    return item.path.parent.name


def group(path):
    """The name of what is run by one process: a file, if not more."""
    folder, file = path.parts[-2:]
    name = f"{folder}/{file}"
    return "quiet" if name in QUIET else TOGETHER.get(name) or TOGETHER.get(folder, name)


class InGroups(LoadScopeScheduling):
    """A file's tests are run by one process, and so are those of folders that go together.

    The quiet ones are left to the process that is the last to have nothing else to do, and wait
    until the others have ended.
    """

    def _split_scope(self, nodeid):
        return group(Path(nodeid.partition("::")[0]))

    def _reschedule(self, node):
        others = [other for other in self.nodes if other is not node]
        if not node.shutting_down and [*self.workqueue] == ["quiet"]:
            if not all(other.shutting_down for other in others):
                return node.shutdown()  # when it has done what it has
            if any(self._pending_of(self.assigned_work[other]) for other in others):
                return None
        return super()._reschedule(node)

    def mark_test_complete(self, node, *test):
        super().mark_test_complete(node, *test)
        for other in self.nodes:  # which may have waited for this node
            if other is not node:
                self._reschedule(other)


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`
    return InGroups(config, log)
