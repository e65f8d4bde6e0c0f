"""Start the processes of a World, on this machine or on the nodes of a Slurm allocation."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from naranhi.distributed import addresses, processes
from naranhi.world import (
    capture,
    cluster,
    controller,
    engine,
    fork,
    leftovers,
    lifeline,
    requirements,
    server,
    slurm,
)
from naranhi.world.cluster import START_SECONDS, START_SECONDS_IN_SLURM
from naranhi.world.errors import RankError, named, unknown
from naranhi.world.keys import Keys
from naranhi.world.member import Member

if TYPE_CHECKING:
    from ipyparallel import AsyncResult


class Launched:
    """Hold `size` rank processes with their controller, their lifelines and their keys.

    Args:
        size: the number of ranks.
        backend: `"nccl"` or `"gloo"`; None means NCCL if there is a GPU for each rank.
        check: called while waiting; may raise to stop the start.

    Raises:
        ValueError: NCCL is requested and there is not one GPU for each rank.
        RankError: the processes did not start; the message quotes what they printed.
    """

    members: list[Member] | None

    def __init__(self, size: int, backend: str | None, check: Callable[[], None]):
        self.in_slurm: bool = slurm.is_here()
        self._limit = START_SECONDS_IN_SLURM if self.in_slurm else START_SECONDS
        self._on_other_hosts = slurm.on_other_hosts()
        self.host: str = addresses.own_address() if self._on_other_hosts else "127.0.0.1"
        if not self._on_other_hosts:
            requirements.loopback()
        requirements.current_folder()
        requirements.open_files(size)
        if backend == "nccl" and not self.in_slurm:
            requirements.gpus(size)
        self.folder: str = requirements.folder()
        self.keys: Keys = Keys()
        self.lifelines: lifeline.Lifelines = lifeline.Lifelines()
        self._server = server.Server(self.host, lifeline=self.lifelines, store=self.keys)
        self._check = check
        self._client = self._cluster = self.members = None
        try:
            self._launch(size)
            self.members = self._introduce(size)
            self.backend: str = self._choose(backend, size)
        except BaseException as error:
            said = self._said()
            self.close()
            if isinstance(error, (RankError, ValueError)) or not isinstance(error, Exception):
                raise
            raise RankError(
                f"the ranks could not be started: {type(error).__name__}: {error}\n"
                f"They said:\n{said}"
            ) from error

    def _launch(self, size):
        python = [sys.executable, "-m"]
        ranks = [*python, (engine if self.in_slurm else fork).__name__]
        launcher = slurm.srun_launcher() if self.in_slurm else cluster.fork_launcher()
        with cluster.environment(self._environment()):
            self._cluster = cluster.make(
                size,
                self.host,
                self.folder,
                launcher,
                [*python, controller.__name__],
                ranks,
                self._limit,
            )
            self._cluster.start_cluster_sync()
            # As its lifeline names it; a laptop's host name may change later.
            self._controller = socket.gethostname(), self._cluster.controller.pid
            self._check()
            pids = self._cluster.controller.pid, self._cluster.engine_set.pid
            Path(self.folder, leftovers.PIDS).write_text("{} {}".format(*pids))
        # Slow, so import while the ranks do; outside of their environment, which sets one thread.
        import torch.distributed  # noqa: F401

        self._client = self._cluster.connect_client_sync(
            ipython_dir=self.folder, timeout=self._limit
        )

    def _environment(self):
        values = {
            server.ADDRESS: self._server.address,
            server.FOLDER: self.folder,
            "NARANHI_NOTEBOOK": str(os.getpid()),
            "IPYTHONDIR": self.folder,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            # Warnings of torch's C++ contain the time of day and would be shown below the cells.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        if not self._on_other_hosts:  # gloo and NCCL open their sockets on this interface
            values |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if self.in_slurm:
            values |= dict.fromkeys(slurm.OF_OTHER_TASKS)
        return values

    def _introduce(self, size):
        start = time.monotonic()
        while len(ids := self._client.ids) < size:
            self._check()
            seconds = time.monotonic() - start
            if seconds > self._limit or not self._cluster.engine_set.process.is_running():
                text = f"{len(ids)} of {size} ranks were up after {seconds:.0f} s. They said:\n"
                raise RankError(text + self._said())
            time.sleep(0.02)
        said = [self._client[i].apply_async(engine.introduce) for i in ids]
        members = [Member(engine=i, **s.get(timeout=30)) for i, s in zip(ids, said, strict=True)]
        # Slurm numbers tasks node by node; ipyparallel numbers engines in order of arrival.
        members.sort(key=lambda m: (m.task, m.pid))
        ranks = Counter()
        for member in members:
            member.local_rank = member.gpu = ranks[member.node]
            ranks[member.node] += 1
        for member in members:
            member.threads = max(1, member.cores // ranks[member.node])
        return members

    def _choose(self, backend, size):
        enough = all(m.gpu < m.gpus for m in self.members)
        if not enough and self.in_slurm and backend != "gloo":
            enough = self._one_each()
        if backend == "nccl" and not enough:
            counts = {m.node: m.gpus for m in self.members}
            raise ValueError(requirements.gpus_short(size, sum(counts.values())))
        return backend or ("nccl" if enough else "gloo")

    def _one_each(self):
        """Return whether each rank sees a GPU that no other has, as with `--gpus-per-task=1`."""
        from naranhi.distributed import gpus

        seen = self.call(gpus.visible, [()] * len(self.members))
        try:
            indices = gpus.allot(seen, [m.local_rank for m in self.members])
        except ValueError:
            return False
        for member, index in zip(self.members, indices, strict=True):
            member.gpu = index
        return True

    # ---- while it runs ------------------------------------------------------------------------

    def submit(self, member: Member, function: Callable[..., Any], *args: Any) -> AsyncResult:
        """Call a function of `engine` in one member; return a pending result for `result`."""
        return self._client[member.engine].apply_async(function, *args)

    @staticmethod
    def result(pending: AsyncResult) -> dict[str, Any]:
        """Return the outcome of a call, even if its reply was an error."""
        from ipyparallel.client.asyncresult import AsyncResult
        from ipyparallel.error import RemoteError

        try:
            return pending.get()
        except RemoteError as error:
            return unanswered(error.ename, error.evalue)
        except Exception as error:  # the reply cannot be unpickled here
            return unanswered(type(error).__name__, str(error))
        finally:
            AsyncResult.split.cache_clear()  # the cache would keep the last 128 results

    def call(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function of `engine` on every rank, each with its own arguments.

        Args:
            function: the function.
            arguments: one tuple of arguments per rank, in rank order.

        Returns:
            The results in rank order.

        Raises:
            RankError: a rank failed or died, or the calls took longer than ranks may take to start.
        """
        pending = [
            self.submit(member, function, *own)
            for member, own in zip(self.members, arguments, strict=True)
        ]
        from ipyparallel.error import RemoteError

        end = time.monotonic() + self._limit
        waiting = dict(enumerate(pending))
        while waiting:
            self._check()
            if gone := self.gone():
                raise RankError(f"{gone} died while the process group was formed")
            if time.monotonic() > end:
                late = named(waiting)
                raise RankError(f"{late} did not join the process group within {self._limit} s")
            for rank in [rank for rank, result in waiting.items() if result.ready()]:
                try:
                    waiting.pop(rank).get()
                except RemoteError as error:
                    text = f"rank {rank} could not join the process group: "
                    raise RankError(f"{text}{error.ename}: {error.evalue}") from None
            if waiting:
                next(iter(waiting.values())).wait(0.05)
        return [result.get() for result in pending]

    def gone(self) -> str:
        """Name the processes that have died, as in a sentence, or return an empty string."""
        ranks = [r for r, m in enumerate(self.members) if not self.lifelines.alive(m.who)]
        parts = [named(ranks)] if ranks else []
        return " and ".join([*parts, *([] if self.controller_alive() else ["the controller"])])

    def controller_alive(self) -> bool:
        """Return whether the controller still holds its lifeline."""
        return self.lifelines.alive(self._controller)

    def how_controller_ended(self) -> str:
        """Return a sentence for the user about the controller's death."""
        return (
            "the controller died (the process through which the notebook reaches its ranks); what "
            "the ranks did in this cell is unknown, and the next cell starts them again"
        )

    def unseen(self, member: Member) -> tuple[str, str]:
        """Return what a dead member printed in its last cell: stdout and stderr."""
        stdout, stderr = capture.unseen(self.folder, member.host, member.pid, member.shown)
        return stdout, stderr.partition("terminate called")[0]

    def how_it_ended(self, member: Member) -> str:
        """Describe how a member's process ended, and quote a library that aborted it."""
        if self.in_slurm:
            return f"its process on {member.host} ended"
        ended = Path(self.folder, f"{member.pid}.ended")
        deadline = time.monotonic() + 2
        while not ended.exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # its parent is about to write the status
        status, kills = map(int, ended.read_text().split()) if ended.exists() else (None, 0)
        if status == -signal.SIGKILL and kills:
            how = "killed by the kernel, which had no memory left for it"
        elif status is not None and status < 0:
            how = f"killed by {signal.Signals(-status).name}"
        else:
            how = "ended" if status is None else f"exit status {status}"
        _, stderr = capture.unseen(self.folder, member.host, member.pid, member.shown)
        words = capture.last_words(stderr)
        return f"{how}: {words}" if words else how

    def _launchers(self):
        return [self._cluster.controller, *self._cluster.engines.values()] if self._cluster else []

    def _said(self):
        """Return the ends of what the processes have printed so far."""
        texts = [cluster.printed(launcher) for launcher in self._launchers()]
        texts += [file.read_text(errors="replace") for file in Path(self.folder).glob("*.said")]
        return "\n".join(text[-2000:] for text in texts)

    def close(self) -> None:
        """Kill the processes, close the sockets, remove the folder."""
        left = self.lifelines.kill()
        step = self.members[0].step if self.members else ""  # "" outside an allocation
        if left and step:
            slurm.kill_step(step)
        for launcher in self._launchers():
            if launcher.state == "running":  # its lifeline may not be connected yet
                processes.kill(launcher.pid)
        if self._client is not None:
            self._client.close()
        self._server.close()
        leftovers.remove(self.folder)


def unanswered(name: str, message: str) -> dict[str, Any]:
    """Return the outcome of a rank that cannot continue: its reply is an error or unreadable."""
    error = unknown(name, message)
    return {"stdout": "", "stderr": "", "displays": [], "error": error, "exhausted": True}
