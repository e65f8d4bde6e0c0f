"""Starting the processes of a World: on this machine, or on the nodes of a Slurm allocation."""

import dataclasses
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from naranhi._ranks import controller, fork, lifeline, process
from naranhi._ranks.failures import RankError

START_SECONDS = 60
# What C++ prints of an exception that nobody caught, less the place in gloo's sources.
LAST_WORDS = re.compile(r"what\(\):\s*(?:\[enforce fail at [^]]*\]\s*)?(.*)")


@dataclasses.dataclass
class Member:
    """One process: where it is, how ipyparallel calls it, its place among those of its host."""

    host: str
    pid: int
    task: int
    gpus: int
    cores: int
    engine: int
    local_rank: int = 0
    threads: int = 1

    @property
    def who(self):
        return self.host, self.pid


class Launched:
    """``size`` rank processes with their controller, their lifelines and a store.

    Raises:
        ValueError: NCCL is wanted and there is not one GPU for each rank.
        RankError: the processes did not come up; says what they printed.
    """

    def __init__(self, size, backend):
        self.in_slurm = "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
        several_nodes = self.in_slurm and int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) > 1
        self.host = _own_address() if several_nodes else "127.0.0.1"
        if not several_nodes:
            _require_loopback()
        if backend == "nccl" and not self.in_slurm:
            _require_gpus(size)
        self.folder = tempfile.mkdtemp(prefix="naranhi-")
        self._lifelines = lifeline.Lifelines(self.host)
        try:
            self._launch(size, several_nodes)
            self.members = self._introduce(size)
            self.backend = self._choose(backend, size)
            self._open_store()
        except BaseException:
            self.close()
            raise

    def _launch(self, size, several_nodes):
        import ipyparallel
        from traitlets.config import Config

        python = [sys.executable, "-m"]
        config = Config()
        config.ControllerLauncher.controller_cmd = [*python, controller.__name__]
        ranks = process if self.in_slurm else fork
        config.EngineLauncher.engine_cmd = [*python, ranks.__name__]
        # The lifeline tells of a death sooner than a nanny process beside every rank would.
        config.EngineLauncher.engine_args = ["--IPEngine.enable_nanny=False", "--log-level=30"]
        quiet = logging.getLogger("naranhi.ipyparallel")
        quiet.setLevel(logging.CRITICAL)
        environment = {
            lifeline.ADDRESS: self._lifelines.address,
            controller.FOLDER: self.folder,
            "NARANHI_NOTEBOOK": str(os.getpid()),
            "IPYTHONDIR": self.folder,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        if not several_nodes:  # gloo's and NCCL's own sockets follow the interface they are given
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        with _environment(environment):
            self._cluster = ipyparallel.Cluster(
                n=size,
                config=config,
                parent=None,
                load_profile=False,
                profile_dir=self.folder,
                cluster_file="",
                engines=_srun_launcher() if self.in_slurm else _fork_launcher(),
                controller_ip=self.host,
                controller_location=self.host,
                controller_args=[
                    "--IPController.use_threads=True",
                    "--IPController.broadcast_scheduler_depth=0",
                    # An engine counts as registered when its heart has beaten once.
                    "--HeartMonitor.period=500",
                    "--HeartMonitor.max_heartmonitor_misses=240",
                ],
                delay=0,
                shutdown_atexit=False,
                log=quiet,
            )
            self._cluster.start_cluster_sync()
        import torch.distributed  # noqa: F401  (it takes a while, as it does in the ranks)

        self._client = self._cluster.connect_client_sync()

    def _introduce(self, size):
        start = time.monotonic()
        while len(ids := self._client.ids) < size:
            seconds = time.monotonic() - start
            if seconds > START_SECONDS or not self._cluster.engine_set.process.is_running():
                raise RankError(
                    f"{len(ids)} of {size} ranks were up after {seconds:.0f} s. "
                    f"They said:\n{self._said()}"
                )
            time.sleep(0.02)
        said = [self._client[i].apply_async(process.introduce) for i in ids]
        members = [Member(engine=i, **s.get(timeout=30)) for i, s in zip(ids, said, strict=True)]
        # Slurm numbers tasks node by node; ipyparallel by who came first.
        members.sort(key=lambda m: (m.task, m.pid))
        hosts = {}
        for member in members:
            member.local_rank = hosts.setdefault(member.host, 0)
            hosts[member.host] += 1
        for member in members:
            member.threads = max(1, member.cores // hosts[member.host])
        return members

    def _choose(self, backend, size):
        enough = all(m.local_rank < m.gpus for m in self.members)
        if backend == "nccl" and not enough:
            counts = {m.host: m.gpus for m in self.members}
            raise ValueError(_gpus_short(size, sum(counts.values())))
        return backend or ("nccl" if enough else "gloo")

    def _open_store(self):
        import torch.distributed as dist

        # Kept by the notebook, so that it survives the ranks; bound by us, because torch would
        # listen on every interface.
        listener = socket.create_server((self.host, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            self.host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.store_address = (self.host, port)

    def submit(self, member, function, *args):
        """Call a function of ``process`` in one member; an AsyncResult."""
        return self._client[member.engine].apply_async(function, *args)

    def alive(self, member):
        return self._lifelines.alive(member.who)

    def tell(self, member, command):
        self._lifelines.tell(member.who, command)

    def kill(self, members):
        self._lifelines.kill([m.who for m in members])

    def how_it_ended(self, member):
        """How a member's process ended, and the last words of a library that gave up in it."""
        if self.in_slurm:
            return f"its process on {member.host} ended"
        ended, said = (Path(self.folder, f"{member.pid}.{what}") for what in ("ended", "said"))
        deadline = time.monotonic() + 2
        while not ended.exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # its parent is about to know
        status = int(ended.read_text()) if ended.exists() else None
        if status is not None and status < 0:
            how = f"killed by {signal.Signals(-status).name}"
        else:
            how = "ended" if status is None else f"exit status {status}"
        words = LAST_WORDS.findall(said.read_text(errors="replace"))
        return f"{how}: {words[-1]}" if words else how

    def _said(self):
        files = [Path(self._cluster.engine_set.output_file), *Path(self.folder).glob("*.said")]
        return "\n".join(file.read_text(errors="replace")[-2000:] for file in files)

    def close(self):
        """Kill the processes, close the sockets, remove the folder."""
        self._lifelines.close()
        if hasattr(self, "_client"):
            self._client.close()
        self._store = None
        controller.remove(self.folder)


def _fork_launcher():
    from ipyparallel.cluster.launcher import MPIEngineSetLauncher

    class ForkEngineSetLauncher(MPIEngineSetLauncher):
        """ipyparallel's launcher by mpiexec, with `fork` in its place and without MPI."""

        def find_args(self):
            return [*self.engine_cmd, str(self.n), *self.program_args]

    return ForkEngineSetLauncher


def _srun_launcher():
    from ipyparallel.cluster.launcher import MPIEngineSetLauncher

    class SrunEngineSetLauncher(MPIEngineSetLauncher):
        """ipyparallel's launcher by mpiexec, with srun in its place and without MPI."""

        @property
        def program(self):
            return self.engine_cmd

        def find_args(self):
            # The ranks share the allocation's cores with the notebook's own step, and one another.
            command = ["srun", "--overlap", "--overcommit", "--kill-on-bad-exit=0"]
            return [*command, f"--ntasks={self.n}", *self.program, *self.program_args]

    return SrunEngineSetLauncher


class _environment:
    """Environment variables for the processes started inside the block."""

    def __init__(self, values):
        self._values = values

    def __enter__(self):
        self._before = {k: os.environ.get(k) for k in self._values}
        os.environ.update(self._values)

    def __exit__(self, *raised):
        for key, value in self._before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _own_address():
    """The address by which the other nodes of the allocation reach this one."""
    return socket.gethostbyname(os.environ.get("SLURMD_NODENAME", socket.gethostname()))


def _require_loopback():
    try:
        server = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(server.getsockname(), timeout=5).close()
        server.close()
    except OSError as error:
        raise RankError(
            f"this machine's loopback interface does not answer ({error.strerror}); ranks talk "
            "over it even without a network. Bring it up: ip link set lo up"
        ) from None


def _require_gpus(size):
    import torch

    if torch.cuda.device_count() < size:
        raise ValueError(_gpus_short(size, torch.cuda.device_count()))


def _gpus_short(size, count):
    return (
        f"backend 'nccl' needs one GPU for each of the {size} ranks, and there "
        f"{'is' if count == 1 else 'are'} {count}; leave out backend= to use gloo"
    )
