"""Programs on ranks that are forked from one process, which has imported what they import.

A rank runs a program as torchrun would have it run, in a process of its own, with the program's
folder first in its path, its arguments, and torchrun's environment; it only finds the libraries
loaded. Loading torch, transformers and DeepSpeed costs seconds of CPU for each rank, and most of
what a short program on four ranks costs at all.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

from naranhi.distributed import processes

SECONDS = 240.0  # for a program: a busy machine takes its time
FORKS_WELL = {"jemalloc_bg_thd"}  # a thread of pyarrow's allocator, which provides for forks itself


class Forked:
    """Run programs on ranks, forked from a process that has imported `modules`."""

    def __init__(self, *modules, **environment):
        self.command = [sys.executable, __file__, *modules]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}

    def __enter__(self):
        self.server = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error):
        self.server.stdin.close()
        self.server.stdout.close()
        assert self.server.wait(30) == 0, "the process from which ranks are forked has failed"

    def run(self, ranks, program, *options, folder="."):
        """What `subprocess.run` returns of `torchrun program` in a folder.

        When a rank fails, the others are ended. A program is a path, or the name of a module.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks' own is this one
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        with tempfile.TemporaryDirectory() as said:
            asked = [said, str(folder), [str(program), *map(str, options)], ranks, shared]
            self.server.stdin.write(json.dumps(asked) + "\n")
            self.server.stdin.flush()
            answer = self.server.stdout.readline()
            texts = ("".join(map(_read, sorted(Path(said).glob(name)))) for name in ("*.1", "*.2"))
            stdout, stderr = texts
        assert answer, f"the process from which ranks are forked has ended\n{stdout}{stderr}"
        codes = json.loads(answer)
        failed = next((code for code in codes if code), 0)
        return subprocess.CompletedProcess(asked[2], failed, stdout, stderr)


def _read(path):
    return path.read_text()


def serve(modules):
    """Fork the ranks of each program that is asked for; tell their exit codes."""
    gc.disable()  # imports leave nothing to collect
    for module in modules:
        import_module(module)
    threads = {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}
    others = threads - {Path(f"/proc/{os.getpid()}/comm").read_text().strip(), *FORKS_WELL}
    assert not others, f"a forked process would lack the threads {others}, begun by an import"
    gc.freeze()  # or a collection in a rank would copy the memory that they share
    gc.enable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    own = os.getpid()
    for line in sys.stdin:
        said, folder, argv, ranks, environment = json.loads(line)
        pids = {}
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                processes.die_with_parent(own)
                answers.close()
                return _become_rank(rank, said, folder, argv, environment)
            pids[pid] = rank
        print(json.dumps(_codes(pids)), file=answers, flush=True)


def _codes(pids):
    """The ranks' exit codes. When one fails, or takes too long, the others are ended."""
    codes, end = {}, time.monotonic() + SECONDS
    while len(codes) < len(pids):
        for pid in [pid for pid, rank in pids.items() if rank not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pids[pid]] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > end:
            time.sleep(0.5)  # another may be about to say what is wrong
            for pid in (pid for pid, rank in pids.items() if rank not in codes):
                os.kill(pid, signal.SIGTERM if time.monotonic() < end + 10 else signal.SIGKILL)
        time.sleep(0.01)
    return [codes[rank] for rank in sorted(codes)]


def _become_rank(rank, said, folder, argv, environment):
    os.chdir(folder)
    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for stream in (1, 2):
        file = os.open(f"{said}/{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
    sys.argv[:] = argv
    if argv[0].endswith(".py"):
        sys.path[0] = str(Path(argv[0]).parent)  # as Python has it for a program
        runpy.run_path(argv[0], run_name="__main__")
    else:
        sys.path[0] = str(folder)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
