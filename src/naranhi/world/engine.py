"""Run inside a rank: join the process group, execute cells, sever connections.

`python -m naranhi.world.engine` is an ipyparallel engine that holds a lifeline to its notebook.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import stat
import sys
from typing import Any

from naranhi.distributed import addresses
from naranhi.world import capture, event_loop, leftovers, lifeline, server, shell, values

_own_sockets = set()
_store = _checks = None
_at_hand = None
_busy = False


def main() -> None:
    """Become an engine. Called once, in a process of its own."""
    if os.getpid() != os.getpgid(0):
        os.setpgid(0, 0)
    capture.start(os.environ[server.FOLDER])
    on_end = leftovers.folder_elsewhere(os.environ[server.FOLDER])
    lifeline.hold({lifeline.INTERRUPT: _interrupt, lifeline.SEVER: sever}, on_end)
    import torch.distributed  # noqa: F401  (before the engine registers: ready means ready)
    from ipyparallel.engine.app import IPEngine

    class Engine(IPEngine):
        def redirect_output(self, iopub_socket):
            capture.repair()  # ipyparallel's streams are messages, lost when the rank dies

    Engine.launch_instance()


def introduce() -> dict[str, str | int]:
    """Return this process's host, node, pid, Slurm task and step (if any), GPUs, and cores."""
    import torch

    return {
        "host": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "pid": os.getpid(),
        "task": int(os.environ.get("SLURM_PROCID", -1)),
        "step": os.environ.get("SLURM_STEP_ID", ""),
        "gpus": torch.cuda.device_count(),
        "cores": len(os.sched_getaffinity(0)),
    }


def join(
    rank: int,
    world_size: int,
    local_rank: int,
    threads: int,
    epoch: int,
    backend: str,
    timeout: float,
) -> list[str]:
    """Join a process group of the World, after leaving the previous one, if any.

    Args:
        rank: this process's rank.
        world_size: the number of ranks.
        local_rank: the rank among the processes of this host; with NCCL the index of its GPU among
            the visible ones, as programs expect of LOCAL_RANK.
        threads: the number of threads that torch may use.
        epoch: the number of the process group, 1 for the World's first.
        backend: `"nccl"` or `"gloo"`.
        timeout: deadline of every collective, in seconds.

    Returns:
        The names of the variables that held old groups; they are deleted.
    """
    global _store, _checks, _at_hand
    import torch
    import torch.distributed as dist

    from naranhi.world.collective_checks import Checks
    from naranhi.world.names import AtHand, remove_groups
    from naranhi.world.outcome import set_aside
    from naranhi.world.store import Store

    names = shell.shell().user_ns
    lost = remove_groups(names)
    deadline = datetime.timedelta(seconds=timeout)
    # Groups that a cell makes without a timeout would otherwise wait for half an hour.
    dist.distributed_c10d.default_pg_timeout = deadline
    dist.distributed_c10d.default_pg_nccl_timeout = deadline
    if dist.is_initialized():
        dist.destroy_process_group()
    if _store is None:
        torch.set_num_threads(threads)
        addresses.use_interface_toward(server.host())
        _own_sockets.update(_sockets())
        _store = Store(timeout)
        _checks = Checks(_store)
        shell.prepare()
    _store.renew()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    _checks.renew(timeout)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"epoch{epoch}", _store),
        rank=rank,
        world_size=world_size,
        timeout=deadline,
    )
    dist.barrier()
    _at_hand = AtHand(
        names, rank=rank, world_size=world_size, device=device, torch=torch, dist=dist
    )
    set_aside()
    if epoch == 1:
        capture.take()  # output of the start matters to the user only if the start fails
    return lost


def execute(source: str) -> dict[str, Any]:
    """Run a cell's source in this rank's namespace; return its outcome (see `outcome`)."""
    own, shown = shell.shell(), []
    own.display_trap.hook = shown.append

    def run(displays):
        result = own.run_cell(source, store_history=False)
        own.history_manager.outputs.clear()  # where IPython keeps a cell's output
        own.last_execution_result = None  # and its error
        shell.raise_shown()
        result.raise_error()
        _synchronize()
        if not own.displayhook.semicolon_at_end_of_expression(source):
            displays.extend(own.display_formatter.format(v) for v in shown if v is not None)
        shell.raise_shown()

    return _outcome_of(run)


def call(pickled: bytes) -> dict[str, Any]:
    """Call a function; return its outcome (see `outcome`).

    Args:
        pickled: a cloudpickle of (function, args, kwargs).
    """
    import cloudpickle

    def run(displays):
        function, args, kwargs = cloudpickle.loads(pickled)
        value = function(*args, **kwargs)
        _synchronize()
        return values.pickled(value)

    return _outcome_of(run)


def get(name: str) -> dict[str, Any]:
    """Look up a variable of this rank; return the outcome (see `outcome`)."""

    def run(displays):
        if name not in shell.shell().user_ns:
            raise NameError(f"name {name!r} is not defined")
        return values.pickled(shell.shell().user_ns[name])

    return _outcome_of(run)


def is_rank() -> bool:
    """Return whether this process is a rank of a World."""
    return _store is not None


def _outcome_of(run):
    """Return the outcome of `run(displays)`, which returns a pickled value or None."""
    from IPython.utils.capture import capture_output

    from naranhi.world.outcome import outcome

    capture.repair()
    displays, error, value = [], None, None
    with capture_output(stdout=False, stderr=False) as captured, event_loop.hidden(), _Busy():
        try:
            value = run(displays)
        except BaseException as raised:
            error = raised
    shell.forget_shown()
    displays[:0] = [(output.data, output.metadata) for output in captured.outputs]
    result = outcome(displays, error, value)
    result["put_back"] = _at_hand.put_back()
    # On NCCL `sever` itself aborts the group.
    result["left_group"] = not _store.severed and _at_hand.left_group()
    capture.repair()  # the engine itself writes to these streams next
    return result


def _synchronize():
    # Raise errors of CUDA kernels and NCCL collectives in the cell that launched them.
    import torch

    if torch.cuda.is_initialized():  # or a context of 500 MB would be made for nothing
        torch.cuda.synchronize()


class _Busy:
    """Mark running code: inside, an INTERRUPT reaches it; outside, it would end the engine."""

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
    """Return the sockets of this process as (file descriptor, inode) pairs."""
    sockets = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(entry))
        except OSError:  # the descriptor of the listing itself
            continue
        if stat.S_ISSOCK(status.st_mode):
            sockets.add((int(entry), status.st_ino))
    return sockets


def sever() -> None:
    """Shut down every TCP connection made since the first `join`, so that waits on them fail.

    That includes the user's: they look the same. gloo cannot abort a collective that waits for a
    peer (`ProcessGroup.abort` does nothing there in torch 2.13). Only the operating system can.
    """
    if _store is not None:
        _store.severed = True
    for descriptor, _ in _sockets() - _own_sockets:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                # Keep listening sockets: gloo ends the process when its listening socket fails.
                listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if internet and not listening:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # its owner or its peer has closed it already
            continue
    distributed = sys.modules.get("torch.distributed")
    joined = distributed is not None and distributed.is_initialized()
    if joined and distributed.get_backend() == "nccl":
        distributed.distributed_c10d._abort_process_group()


if __name__ == "__main__":
    # Under -m this file is __main__, but the notebook calls naranhi.world.engine: run that module,
    # to have one set of globals.
    from naranhi.world import engine

    engine.main()
