import os
import shutil
import signal

import pytest

# A shell starts what it puts in the background deaf to Ctrl-C, and so would be all processes that
# the tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


FOLDERS = {  # the longest first, so that no process is left with it in the end
    "notebooks": "notebooks",
    "site": "browser",
    "world": "ranks",
    "recipes": "ranks",
    "ranks": "ranks",
    "cluster": "slurm",
}
# What shares `_build`, or looks at all processes of the machine.
TOGETHER = {"notebooks": "book", "site": "book", "world": "world", "cluster": "world"}


def pytest_collection_modifyitems(items):
    """Mark each test by what its folder needs, and group the tests that one process has to run."""
    order = [*FOLDERS, "units"]
    items.sort(key=lambda item: order.index(item.path.parent.name))
    for item in items:
        folder = item.path.parent.name
        if folder in FOLDERS:
            item.add_marker(FOLDERS[folder])
        item.add_marker(pytest.mark.xdist_group(TOGETHER.get(folder, str(item.path))))
