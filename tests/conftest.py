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


FOLDERS = {
    "ranks": "ranks",
    "world": "ranks",
    "recipes": "ranks",
    "notebooks": "notebooks",
    "site": "browser",
    "cluster": "slurm",
}


def pytest_collection_modifyitems(items):
    """Mark each test by what its folder needs."""
    for item in items:
        marker = FOLDERS.get(item.path.parent.name)
        if marker:
            item.add_marker(marker)
