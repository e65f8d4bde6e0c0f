"""What runs inside a rank: joining the process group, executing cells, severing connections.

``python -m naranhi.world.engine`` is an ipyparallel engine that holds a lifeline to its notebook.
"""

import builtins
import datetime
import os
import signal
import socket
import stat
import sys

from naranhi.world import capture, event_loop, lifeline, server

_own_sockets = set()
_store = None
_at_hand = None
_busy = False


def main():
    """Become an engine. Called once, in a process of its own."""
    if os.getpid() != os.getpgid(0):
        os.setpgid(0, 0)
    capture.start(os.environ[server.FOLDER])
    lifeline.hold({lifeline.INTERRUPT: _interrupt, lifeline.SEVER: sever})
    import torch.distributed  # noqa: F401  (before the engine registers: ready means ready)
    from ipyparallel.engine.app import IPEngine

    class Engine(IPEngine):
        def redirect_output(self, iopub_socket):
            capture.repair()  # in place of streams that are messages, and are lost with the rank

    Engine.launch_instance()


def introduce():
    """Who this process is: host, pid, Slurm's task and step if any, GPUs it can see, cores."""
    import torch

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "task": int(os.environ.get("SLURM_PROCID", -1)),
        "step": os.environ.get("SLURM_STEP_ID", ""),
        "gpus": torch.cuda.device_count(),
        "cores": len(os.sched_getaffinity(0)),
    }


def join(rank, world_size, local_rank, threads, epoch, backend, timeout):
    """Join the process group number ``epoch`` of the World; leaves the one before it, if any.

    Args:
        timeout: deadline of every collective, in seconds.

    Returns:
        The names of the variables that held groups of the past; they are deleted.
    """
    global _store, _at_hand
    import torch
    import torch.distributed as dist

    from naranhi.world.collective_checks import Checks
    from naranhi.world.names import AtHand, remove_groups
    from naranhi.world.outcome import set_aside
    from naranhi.world.store import Store

    names = _shell().user_ns
    lost = remove_groups(names)
    deadline = datetime.timedelta(seconds=timeout)
    # Groups that the reader makes without a timeout would otherwise wait for half an hour.
    dist.distributed_c10d.default_pg_timeout = deadline
    dist.distributed_c10d.default_pg_nccl_timeout = deadline
    if dist.is_initialized():
        dist.destroy_process_group()
    if _store is None:
        torch.set_num_threads(threads)
        _own_sockets.update(_sockets())
        _store = Store(timeout)
        _prepare_shell()
    _store.renew()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    Checks(_store, timeout)
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
        capture.take()  # what starting has printed is the reader's business only when it fails
    return lost


def _prepare_shell():
    shell = _shell()
    shell.showtraceback = shell.showsyntaxerror = _leave_it_to_the_notebook
    shell.loop_runner = event_loop.run
    builtins.input = _no_keyboard


def _leave_it_to_the_notebook(*args, **kwargs):
    """In place of the engine's own printing of errors."""


def _no_keyboard(prompt=""):
    raise EOFError(
        "a rank has no keyboard to read from; call input() in a cell without %%ranks and pass "
        "the answer on: world.run(function, answer)"
    )


def execute(source):
    """Run a cell's source in this rank's namespace; returns its outcome (see `outcome`)."""
    shell = _shell()
    values = []
    shell.display_trap.hook = values.append

    def run(displays):
        result = shell.run_cell(source, store_history=False)
        shell.history_manager.outputs.clear()  # where IPython keeps what a cell has printed
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            raise error
        _synchronize()
        if not shell.displayhook.semicolon_at_end_of_expression(source):
            shown = (shell.display_formatter.format(v) for v in values if v is not None)
            displays.extend(shown)

    return _outcome_of(run)


def call(pickled):
    """Call a function with its arguments (a cloudpickle of the three); returns its outcome."""
    import cloudpickle

    def run(displays):
        function, args, kwargs = cloudpickle.loads(pickled)
        value = function(*args, **kwargs)
        _synchronize()
        return cloudpickle.dumps(value)

    return _outcome_of(run)


def get(name):
    """The outcome of looking up a variable of this rank."""
    import cloudpickle

    def run(displays):
        if name not in _shell().user_ns:
            raise NameError(f"name {name!r} is not defined")
        return cloudpickle.dumps(_shell().user_ns[name])

    return _outcome_of(run)


def _outcome_of(run):
    """What comes of ``run(displays)``, which returns a pickled value or None."""
    from IPython.utils.capture import capture_output

    from naranhi.world.outcome import outcome

    capture.repair()
    displays, error, value = [], None, None
    with capture_output(stdout=False, stderr=False) as captured, event_loop.hidden(), _Busy():
        try:
            value = run(displays)
        except BaseException as raised:
            error = raised
    displays[:0] = [(output.data, output.metadata) for output in captured.outputs]
    result = outcome(displays, error, value)
    result["put_back"], result["left_group"] = _at_hand.put_back(), _at_hand.left_group()
    capture.repair()  # the engine itself writes to the streams next
    return result


def _shell():
    from IPython import get_ipython

    return get_ipython()


def _synchronize():
    # An error of a CUDA kernel or an NCCL collective belongs to the cell that launched it.
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
    if _store is not None:
        _store.severed = True
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
    # Under -m this file is __main__; the notebook calls naranhi.world.engine. One set of globals.
    from naranhi.world import engine

    engine.main()
