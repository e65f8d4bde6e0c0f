"""How the processes of `torchrun` or `srun` find each other and become one process group.

The ranks of a notebook have their `World` for this. A program that runs under either launcher calls
`join` once, and passes the groups that it makes to the same kernels.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from naranhi.distributed import addresses, gpus, processes

# What `join` reads of a task of srun: rank, number of ranks, rank on its node, and the meeting.
OF_SRUN = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES", "SLURM_JOB_ID"


def join(timeout: float = 300.0, folder: str | Path | None = None) -> torch.device:
    """Join the default process group: NCCL if each rank can have its own GPU, else gloo.

    A launcher may show a rank all GPUs of its host or only its own. If some ranks see GPUs, but a
    rank sees none or two would share one, all ranks compute on CPUs, and a warning says why.

    Under `torchrun` the launcher has arranged the rendezvous, and the operating system kills this
    process when the launcher ends. With its `--max-restarts`, set
    `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: otherwise ranks may find addresses of the previous
    attempt in the launcher's store (torch 2.13), and most restarts fail. Only the c10d rendezvous
    reads the variable: on several nodes, pass `--rdzv-backend c10d` and no `--master-addr`.

    Under `srun` rank 0 listens on a port that the system chooses and writes its address to a file
    that all ranks can read. If one machine has all ranks, they find each other and communicate over
    its loopback interface.

    Args:
        timeout: the deadline of the rendezvous and of every collective, also of groups made later
            without an explicit timeout, in seconds.
        folder: the folder for the address file, on a file system that the nodes share; by default
            the folder that the job was submitted from.

    Returns:
        This rank's device.

    Raises:
        RuntimeError: neither launcher started this process, its environment is incomplete, or the
            ranks did not meet in time.
    """
    deadline = datetime.timedelta(seconds=timeout)
    # Groups that are made later without a timeout would otherwise wait for half an hour.
    dist.distributed_c10d.default_pg_timeout = deadline
    dist.distributed_c10d.default_pg_nccl_timeout = deadline
    if "RANK" in os.environ:
        start = "torchrun --standalone --nproc-per-node 4 PROGRAM"
        _require("RANK", ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), start)
        rank, world_size, port = map(_number, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if rank >= world_size:
            raise RuntimeError(
                f"RANK is {rank} in the environment and WORLD_SIZE {world_size}: RANK has to be "
                "smaller, and begins at 0"
            )
        if port >= 2**16:
            raise RuntimeError(f"MASTER_PORT is {port} in the environment: ports end at 65535")
        local_rank = _local_rank(rank)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            processes.die_with_parent(os.getppid())
            if _number_or("LOCAL_WORLD_SIZE", None) == world_size:
                # torchrun sets its host's name, which cannot be resolved without a network.
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                _loopback_only()
        store, _, _ = next(dist.rendezvous("env://", timeout=deadline))
        store.set_timeout(deadline)
        if _number_or("LOCAL_WORLD_SIZE", world_size) < world_size:
            _interface_toward_other_nodes(dist.PrefixStore("nodes", store))
    elif "SLURM_STEP_ID" in os.environ:
        of_folder = () if folder else ("SLURM_SUBMIT_DIR",)
        _require("SLURM_STEP_ID", (*OF_SRUN, *of_folder), "srun --ntasks 4 python PROGRAM")
        rank, world_size, local_rank = map(_number, OF_SRUN[:3])
        folder = Path(folder or os.environ["SLURM_SUBMIT_DIR"])
        store = _slurm_store(rank, world_size, deadline, folder)
    else:
        raise RuntimeError(
            "this process was started by neither torchrun nor srun; "
            "try: torchrun --standalone --nproc-per-node 4 PROGRAM"
        )
    device, backend = torch.device("cpu"), "gloo"
    index = _own_gpu(dist.PrefixStore("gpus", store), rank, world_size, local_rank)
    if index is not None:
        device, backend = torch.device("cuda", index), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("default_pg", store),
        rank=rank,
        world_size=world_size,
        timeout=deadline,
    )
    return device


def _require(known, names, start):
    """Raise RuntimeError, with the command to `start` with, if one of `names` is not set."""
    for name in names:
        if name not in os.environ:
            raise RuntimeError(
                f"{known} is in the environment and {name} is not; a launcher sets both: {start}"
            )


def _number(name):
    """Return a whole number from the environment."""
    value = os.environ[name]
    if not value.isdecimal():
        raise RuntimeError(f"{name} is {value!r} in the environment, and not a whole number")
    return int(value)


def _number_or(name, other):
    return _number(name) if name in os.environ else other


def _local_rank(rank):
    """Return this rank's number among those of its host, as far as the environment says."""
    # SLURM_LOCALID counts only if this rank is the task; a shell's task has a different number.
    of_slurm = _number_or("SLURM_PROCID", None) == rank
    return _number_or("LOCAL_RANK", _number_or("SLURM_LOCALID", rank) if of_slurm else rank)


def _interface_toward_other_nodes(store):
    """Let gloo listen where the other nodes reach this one.

    By default gloo listens at the address of the host's own name, a loopback address on Debian. On
    its own node `MASTER_ADDR` may resolve to loopback too: ranks there look toward another node.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        own = addresses.toward(os.environ["MASTER_ADDR"])
    except RuntimeError:  # by IPv6 only, for example: leave the choice to gloo
        return
    if own.startswith("127."):
        addresses.use_interface_toward(store.get("another").decode())
    else:
        store.set("another", own)
        addresses.use_interface_toward(own)


def _own_gpu(store, rank, world_size, local_rank):
    """Return the index of this rank's GPU among those it sees, or None if all use the CPU."""
    store.set(str(rank), json.dumps([gpus.visible(), local_rank]))
    values = store.multi_get([str(other) for other in range(world_size)])
    visible, local_ranks = zip(*map(json.loads, values), strict=True)
    try:
        return gpus.allot(visible, local_ranks)[rank]
    except ValueError as error:
        if any(visible) and rank == 0:
            warnings.warn(f"all ranks compute on CPUs, because {error}", stacklevel=3)
        return None


def _loopback_only():
    """Use only the loopback interface, since nothing needs to listen beyond this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _slurm_store(rank, world_size, deadline, folder):
    """Return rank 0's store; the other ranks read its address from a short-lived file."""
    # A job that was requeued has the same number, and its steps begin at 0 again.
    step = "{SLURM_JOB_ID}-{SLURM_STEP_ID}".format(**os.environ)
    file = folder / f"naranhi-{step}-{os.environ.get('SLURM_RESTART_COUNT', 0)}.address"
    alone = _number("SLURM_STEP_NUM_NODES") == 1
    if rank > 0:
        host, port = _read(file, deadline)
    else:
        host = "127.0.0.1" if alone else addresses.own_address()
    if alone:
        _loopback_only()
    else:
        addresses.use_interface_toward(host)
    if rank > 0:
        store = dist.TCPStore(host, port, is_master=False, timeout=deadline)
        store.add("arrived", 1)
        return store
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=deadline,
        master_listen_fd=listener.detach(),
    )
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps([host, port]))
    draft.rename(file)  # atomic, so that no rank reads half of it
    end = time.monotonic() + deadline.total_seconds()
    while (arrived := store.add("arrived", 0)) < world_size - 1 and time.monotonic() < end:
        time.sleep(0.02)
    file.unlink()
    if arrived < world_size - 1:
        raise RuntimeError(f"{arrived + 1} of {world_size} ranks met within {deadline}")
    return store


def _read(file, deadline):
    end = time.monotonic() + deadline.total_seconds()
    while not file.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"rank 0 left no address in {file}: do the nodes share this folder?")
        time.sleep(0.02)
    return json.loads(file.read_text())
