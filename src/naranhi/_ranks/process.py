"""What runs inside a rank: joining the process group, executing cells, severing connections.

``python -m naranhi._ranks.process`` is an ipyparallel engine that holds a lifeline to its notebook.
"""

import datetime
import os
import signal
import socket
import stat
import sys
import traceback

from naranhi._ranks import lifeline

_own_sockets = set()
_store = None
_checks = None
_busy = False


def main():
    """Become an engine. Called once, in a process of its own."""
    if os.getpid() != os.getpgid(0):
        os.setpgid(0, 0)
    lifeline.hold({lifeline.INTERRUPT: _interrupt, lifeline.SEVER: sever})
    import torch.distributed  # noqa: F401  (before the engine registers: ready means ready)
    from ipyparallel.engine.app import main as engine

    engine()


def introduce():
    """Who this process is: host, pid, Slurm's task number if any, GPUs it can see, cores."""
    import torch

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "task": int(os.environ.get("SLURM_PROCID", -1)),
        "gpus": torch.cuda.device_count(),
        "cores": len(os.sched_getaffinity(0)),
    }


def join(rank, world_size, local_rank, threads, store, epoch, backend, timeout):
    """Join the process group number ``epoch`` of the World; leaves the one before it, if any.

    Args:
        store: (host, port) of the notebook's store.
        timeout: deadline of every collective, in seconds.

    Returns:
        The names of the variables that held groups of the past; they are deleted.
    """
    global _store, _checks
    import torch
    import torch.distributed as dist

    from naranhi._ranks.checks import Checks

    names = _shell().user_ns
    outside = dist.GroupMember.NON_GROUP_MEMBER
    lost = [n for n, v in names.items() if isinstance(v, dist.ProcessGroup) or v is outside]
    for name in lost:
        del names[name]
    deadline = datetime.timedelta(seconds=timeout)
    # Groups that the reader makes without a timeout would otherwise wait for half an hour.
    dist.distributed_c10d.default_pg_timeout = deadline
    dist.distributed_c10d.default_pg_nccl_timeout = deadline
    if dist.is_initialized():
        dist.destroy_process_group()
    if _store is None:
        torch.set_num_threads(threads)
        _store = dist.TCPStore(*store, is_master=False, timeout=deadline)
        _own_sockets.update(_sockets())
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    store = dist.PrefixStore(f"epoch{epoch}", _store)
    _checks = Checks(dist.PrefixStore("checks", store), timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=deadline,
    )
    dist.barrier()
    names.update(rank=rank, world_size=world_size, device=device, torch=torch, dist=dist)
    return lost


def execute(source):
    """Run a cell's source in this rank's namespace; returns its outcome (see ``_outcome``)."""
    from IPython.utils.capture import capture_output

    shell = _shell()
    shell.showtraceback = shell.showsyntaxerror = _leave_it_to_the_notebook
    values = []
    shell.display_trap.hook = values.append
    with capture_output() as captured, _Busy():
        result = shell.run_cell(source, store_history=False)
        error = result.error_before_exec or result.error_in_exec
        if error is None:
            _synchronize()
    outcome = _outcome(captured, error)
    if not shell.displayhook.semicolon_at_end_of_expression(source):
        shown = [shell.display_formatter.format(v) for v in values if v is not None]
        outcome["displays"].extend(shown)
    return outcome


def _leave_it_to_the_notebook(*args, **kwargs):
    """In place of the engine's own printing of errors."""


def call(pickled):
    """Call a function with its arguments (a cloudpickle of the three); returns its outcome."""
    import cloudpickle

    def run():
        function, args, kwargs = cloudpickle.loads(pickled)
        value = function(*args, **kwargs)
        _synchronize()
        return value

    return _valued(run)


def get(name):
    """The outcome of looking up a variable of this rank."""

    def look_up():
        if name not in _shell().user_ns:
            raise NameError(f"name {name!r} is not defined")
        return _shell().user_ns[name]

    return _valued(look_up)


def _valued(function):
    """The outcome of a function without arguments, with its value pickled."""
    import cloudpickle
    from IPython.utils.capture import capture_output

    error = value = None
    with capture_output() as captured, _Busy():
        try:
            value = cloudpickle.dumps(function())
        except BaseException as raised:
            error = raised
    return _outcome(captured, error, value)


def _shell():
    from IPython import get_ipython

    return get_ipython()


def _synchronize():
    # An error of a CUDA kernel or an NCCL collective belongs to the cell that launched it.
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _outcome(captured, error, value=None):
    """Plain data: stdout, stderr, displays (data, metadata), error or None, pickled value."""
    displays = [(o.data, o.metadata) for o in captured.outputs]
    outcome = {
        "stdout": captured.stdout,
        "stderr": captured.stderr,
        "displays": displays,
        "error": None,
        "value": value,
    }
    if error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        outcome["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "frames": [(f.filename, f.lineno, f.name, f.line or "") for f in frames],
            "syntax": error.lineno if isinstance(error, SyntaxError) else None,
            "calls": getattr(error, "calls", None),
            "absent": getattr(error, "absent", None),
        }
    return outcome


class _Busy:
    """While inside, an INTERRUPT reaches the running code; outside, it would end the engine."""

    def __enter__(self):
        global _busy
        _busy = True

    def __exit__(self, *raised):
        global _busy
        _busy = False


def _interrupt():
    if _busy:
        os.kill(os.getpid(), signal.SIGINT)


def _sockets():
    """The TCP sockets of this process, by file descriptor and inode."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(entry))
        except OSError:  # the descriptor of the listing itself
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add((int(entry), status.st_ino))
    return found


def sever():
    """Shut down every connection that process groups opened: all that wait on them fail at once.

    gloo offers no way to abort a collective that waits for a peer (``ProcessGroup.abort`` does
    nothing there in torch 2.13), and only the operating system can end such a wait early.
    """
    if _checks is not None:
        _checks.severed = True
    for descriptor, _ in _sockets() - _own_sockets:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                # gloo ends the process when its listening socket fails.
                listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if internet and not listening:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed by its owner or its peer since we looked, which is as good
            continue
    distributed = sys.modules.get("torch.distributed")
    joined = distributed is not None and distributed.is_initialized()
    if joined and distributed.get_backend() == "nccl":
        distributed.distributed_c10d._abort_process_group()


if __name__ == "__main__":
    # Under -m this file is __main__; the notebook calls naranhi._ranks.process. One set of globals.
    from naranhi._ranks import process

    process.main()
