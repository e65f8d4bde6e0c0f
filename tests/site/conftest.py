import functools
import subprocess
import sys
import threading
from contextlib import nullcontext
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import host_network
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
for place in ("book", "book/_ext", "book/_lab"):
    sys.path.insert(0, str(REPOSITORY / place))

import browser  # noqa: E402


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Let no address of the host change while a page is looked at."""
    looks = item.path.parent == Path(__file__).parent  # it is called for tests of all folders
    with host_network.unchanged() if looks else nullcontext():
        return (yield)


@pytest.fixture(scope="session")
def built():
    """The folder of the site, built: which takes seconds when nothing has changed."""
    build = [sys.executable, REPOSITORY / "book" / "build.py", "--jobs", "2"]
    result = subprocess.run(build, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return REPOSITORY / "_build" / "html"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(built):
    """The address of the site."""
    handler = functools.partial(Quiet, directory=built)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as started:
        yield started
