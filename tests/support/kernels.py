"""A real Jupyter kernel, driven as a notebook drives it."""

import contextlib
import os
import queue
import signal
import tempfile
import time
from pathlib import Path

from jupyter_client.manager import KernelManager
from traitlets.config import Config

from naranhi.distributed import processes

START = "import naranhi\nworld = naranhi.World(4)"


class CellError(Exception):
    """A cell failed; ``text`` is what the reader sees, below what was ``printed``."""

    def __init__(self, text, printed=""):
        super().__init__(text)
        self.text, self.printed = text, printed


def without_tcp(folder):
    """Configure a kernel: ports are chosen before it binds them, and another may be quicker."""
    return Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})


class Notebook:
    """Runs cells; ``run`` returns what they print, and raises CellError where they fail."""

    def __init__(self):
        self.sockets = tempfile.TemporaryDirectory()  # its name is short, as a socket's has to be
        self.manager = KernelManager(config=without_tcp(self.sockets.name))
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
        except RuntimeError:
            self.close()
            raise
        self.pid = self.manager.provisioner.pid

    def run(self, cell, timeout=90):
        return self.finish(self.begin(cell), timeout)

    def begin(self, cell):
        return self.client.execute(cell, stop_on_error=False)

    def finish(self, request, timeout=90):
        end, printed, error = time.monotonic() + timeout, "", None
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=end - time.monotonic())
            except queue.Empty:
                raise TimeoutError(f"the cell still ran after {timeout} s:\n{printed}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "error":
                error = CellError("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                if error is not None:
                    error.printed = printed
                    raise error
                return printed

    def wait_for_output(self, request, timeout=90):
        """Wait until a cell has printed something, which `finish` will not return then."""
        kind = None
        while kind != "stream":
            message = self.client.get_iopub_msg(timeout=timeout)
            kind = message["parent_header"].get("msg_id") == request and message["msg_type"]

    def interrupt(self):
        self.manager.interrupt_kernel()

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.sockets.cleanup()


@contextlib.contextmanager
def notebook():
    opened = Notebook()
    try:
        yield opened
    finally:
        opened.close()


def processes_of(pid):
    """The processes that a World of the notebook ``pid`` started, found by their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != pid:
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if f"NARANHI_NOTEBOOK={pid}\0".encode() in environment and state != "Z":
                    found.append(int(entry.name))
    return found


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def stop(pid):
    """Stop a process, and wait until it stands: each of its threads first needs a core."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: processes.is_stopped(pid), 10)
